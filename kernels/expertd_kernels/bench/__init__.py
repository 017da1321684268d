"""What a user runs to measure his own machine."""
