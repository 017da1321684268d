"""One module for each kind of storage; protocol.py says how one is added."""
