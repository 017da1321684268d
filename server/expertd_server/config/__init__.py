"""What `expertd serve` is asked to do: flag, then EXPERTD_*, then file, then default.  Imports no torch."""
