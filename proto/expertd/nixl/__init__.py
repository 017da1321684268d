"""Sessions over NIXL: between hosts, by RDMA where they have it, by TCP or shared memory where not.

A session is two regions of shared memory (expertd.shm) of the same size, one on each host, and two relays that keep
them alike, each a process of its own:

    client | region | NearRelay  ==== NIXL ====  FarRelay | region | the engine's core

The relay of a client takes its requests as a server would, writes what they read into the other region, at the same
offsets, and notifies; the server's relay hands them to the core as a client would, and writes answers back.  Neither
client nor core knows of NIXL, and each checks its region as it always does.

Relays are processes because UCX, by which NIXL moves memory, writes for a peer wherever that peer says, on all networks
but RDMA: a peer can then spoil or kill the relay of its own session, and reaches nothing else.

    find        which package of NIXL there is
    agent       one of NIXL's agents: a piece of memory, and writes to that of one peer
    notes       what a notification says, and who may not say it
    relay       the two relays, as `python -m expertd.nixl.relay`
    process     starts one
"""
