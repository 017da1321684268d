"""Layers in a backend's layout: their files, the cache of them, and the proof that they compute right."""
