"""The Hopper backend's parts: codec and packing (any device), plans, device code, launches.  Row: gluon_sm90."""
