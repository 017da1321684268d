"""The command `expertctl` and what only it needs: load, plans, rebalancing, simulation, Ray, pictures, benchmarks.

It imports `expertd_client`, the library of inference engines; the library imports nothing of this package.
"""
