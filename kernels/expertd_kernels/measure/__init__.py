"""What is found by timing on this machine: autotuning of backends, the number of CPU threads."""
