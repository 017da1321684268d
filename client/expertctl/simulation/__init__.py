"""A cluster larger than the machines at hand: `expertctl simulate`.

service   what a server takes for a batch: measured, or given
trace     which calls come when, and which servers fail when: the same for both worlds
world     virtual time, and servers in it that batch, die and hang
simulate  the client's own cluster code in that world: cluster.flight, members, policy, split
real      the same code on real time, with threads as servers, to see how far the simulation is right
outcome   what callers noticed
"""
