"""From a configuration to layers that are ready to compute."""
