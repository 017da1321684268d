"""A running cluster is brought to a placement, while it serves: what `expertctl apply` does.

steps      from what is held to what is to be held, a few layers at a time: first more replicas, then fewer
admin      one server's AdminService
rebalance  does the steps at all servers, and takes them back where one fails
"""
