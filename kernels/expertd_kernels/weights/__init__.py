"""What weights are: schemes, canonical tensors, their float32 meaning, quantizing them.  Knows no backend."""
