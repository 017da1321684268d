"""The Open Inference Protocol's messages, a part of them: a facade of the server speaks it."""
