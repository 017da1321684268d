"""Requests and answers through memory that a client and a server of one host share: no message, no copy of a tensor
between them.

    layout    what lies in a region: the structs, in Python
    region    a region's memory and its two eventfds: made, sealed, sent over a Unix socket, mapped
    client    the client's side: tensors in the arena, requests in flight, waiting for answers
    csrc/     the C++ behind client (and the header that the server's engine includes)

A region belongs to one session.  The server makes it and seals its size, so neither side can pull it from under the
other.  It holds two rings of fixed entries and an arena that the client alone divides.  Whatever the other side writes
is copied before it is checked, and the copy is used.
"""
