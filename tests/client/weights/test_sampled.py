"""A trainer's tensors give the identity that a server finds in a folder of them, and nothing where some are missing."""

import numpy as np
import torch

from expertd.common.identity import sample_of, sampled_identity
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.weights.sampled import Sampled

TENSORS = {"a": torch.arange(5000, dtype=torch.float32), "b": torch.arange(12, dtype=torch.bfloat16).view(3, 4)}


def begun(*names, base="sampled:0"):
    return pb.BeginUpdateResponse(sampled=names, base_identity=base)


def of(tensors):
    samples = {}
    for name, t in tensors.items():
        raw = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[t.dtype]
        samples[name] = sample_of(dtype, t.shape, len(raw), lambda at, n, raw=raw: raw[at : at + n])
    return sampled_identity(samples)


def put(tensors, answers=None, delta=False):
    out = Sampled([begun("a", "b")] if answers is None else answers, delta)
    for name, t in tensors.items():
        out.put(name, t)
    return out.identity()


def test_torch_and_numpy_and_any_layout_are_alike():
    assert put(TENSORS) == of(TENSORS)
    assert put({"a": TENSORS["a"].numpy(), "b": TENSORS["b"]}) == of(TENSORS)
    assert put({"a": TENSORS["a"], "b": TENSORS["b"].t().contiguous().t()}) == of(TENSORS)
    assert put(TENSORS | {"router": np.zeros(3, np.float32)}) == of(TENSORS), "it is not among them"


def test_what_is_missing_or_wanted_otherwise_leaves_it_unknown():
    assert put({"a": TENSORS["a"]}) == ""
    assert put(TENSORS, ()) == ""
    assert put(TENSORS, [begun("a", "b"), begun("a")]) == ""
    assert put(TENSORS, [begun()]) == "", "a server of an older version"


def test_a_delta_is_of_its_base_and_of_what_was_put():
    one = put({"b": TENSORS["b"]}, delta=True)
    assert one.startswith("changes:")
    assert one not in {put({"b": TENSORS["b"] + 1}, delta=True), put({}, delta=True)}
    assert put({"b": TENSORS["b"]}, [begun(base="sampled:1")], delta=True) != one
    assert put({"b": TENSORS["b"]}, [begun(), begun(base="")], delta=True) == ""
    sent = Sampled([begun()], delta=True)
    sent.put_delta("b", b"zstd")
    assert sent.identity().startswith("changes:")
