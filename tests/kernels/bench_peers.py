"""Peers for the CPU benchmark's tests: processes of its own import them by name."""

import hashlib
import os
import threading

import torch


def spin(rounds=20_000):
    """Computes, for some 10 ms by default, without Python's lock."""
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", rounds)


def spins(weights, top_k, threads):
    """A thread of it computes on after each call."""

    def call(x, ids, w):
        threading.Thread(target=spin).start()
        return torch.zeros_like(x)

    return call


def ends(weights, top_k, threads):
    """Ends its process at 9 tokens."""

    def call(x, ids, w):
        if x.shape[0] == 9:
            os._exit(3)
        return torch.zeros_like(x)

    return call


def raises(weights, top_k, threads):
    raise RuntimeError(f"no {threads} threads")
