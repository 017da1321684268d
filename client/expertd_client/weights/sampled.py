"""What servers compare to find out that they have the same version of the weights: made while tensors are put."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

from expertd.common.identity import changed_identity, sample_of, sampled_identity
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.weights.tensors import dtype_of, raw_of

__all__ = ["Sampled"]


class Sampled:
    """begun: the answers of all servers; delta: tensors that are not put stay as they are."""

    def __init__(self, begun: Iterable[pb.BeginUpdateResponse], delta: bool) -> None:
        answers = list(begun)
        wanted = {frozenset(answer.sampled) for answer in answers}
        bases = {answer.base_identity for answer in answers}
        self._wanted = wanted.pop() if len(wanted) == 1 else frozenset[str]()
        self._base = bases.pop() if len(bases) == 1 else ""
        self._delta = delta
        self._samples: dict[str, bytes] = {}

    def put(self, name: str, tensor: Any) -> None:
        """A tensor that is sent to whoever holds its expert.  Raises BadDtypeError."""
        if name in self._wanted or (self._delta and self._base):
            self._samples[name] = _sample(name, tensor)

    def put_delta(self, name: str, data: bytes) -> None:
        """A difference."""
        if self._delta and self._base:
            self._samples[name] = hashlib.sha256(data).digest()

    def identity(self) -> str:
        """Of the new version; "" where what was put does not tell."""
        if self._delta:
            return changed_identity(self._base, self._samples)
        return sampled_identity(self._samples) if self._wanted and self._wanted == self._samples.keys() else ""


def _sample(name: str, tensor: Any) -> bytes:
    whole = getattr(tensor, "full_tensor", None)
    if callable(whole):
        tensor = whole()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor) and tensor.is_contiguous():  # a piece of it is copied
        flat = tensor.detach().reshape(-1).view(torch.uint8)

        def read(offset: int, length: int) -> bytes:
            return bytes(flat[offset : offset + length].cpu().numpy().data)

        return sample_of(dtype_of(name, tensor), list(tensor.shape), flat.numel(), read)
    dtype, shape, raw = raw_of(name, tensor)
    return sample_of(dtype, shape, raw.nbytes, lambda offset, length: raw[offset : offset + length].tobytes())
