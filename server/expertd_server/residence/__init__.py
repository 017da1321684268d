"""Which layers and experts are held: added and removed while they are served, remembered over restarts."""
