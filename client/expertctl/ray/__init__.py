"""Servers as actors of Ray (extra `ray`): started by `expertctl ray up`, followed by clusters with
expertd_client.RayServers.

    spec      what is wanted: parts, replicas, resources; nothing of Ray
    watched   what is known of one server, and what becomes of it
    coordinator  the actor that starts servers, starts them again, and says which there are
    server    the actor around one server
    deploy    up, status, down
    follow    the file of a placement, kept up to date for clients outside of Ray

docs/ray.md is for operators.
"""
