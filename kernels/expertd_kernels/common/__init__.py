"""What every folder uses: the problem, the protocol of backends, refusals, sizes, files."""
