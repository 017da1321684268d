"""Sessions over TCP, between hosts: frames of the contract's own messages, without gRPC around each.

    entry      how a client enters: its token, and what the server says
    tls        the same bytes through TLS, where the session that opened it has TLS
    client     the client's side in C++: requests in flight, waiting for answers
    csrc       frame.h and wire.h say what travels, to both sides

After the entry each side sends frames: 16 bytes (magic, length, sequence, lead; csrc/frame.h), then a
StreamForwardRequest or StreamForwardResponse of the contract.  Tensors travel as raw bytes, each side counts its own
frames.
"""
