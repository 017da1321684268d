"""What is found by timing on this machine: the tournament of backends, the number of CPU threads."""
