"""Where layers of weights come from, behind one seam: synthetic models, and a source quantized as it is loaded."""
