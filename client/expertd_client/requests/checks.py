"""What of a request can be checked without the server, and what its message has in common with others like it."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from expertd.codec import RequestForm
from expertd.common.dtypes import FLOAT_DTYPES, HIDDEN_DTYPES, INT_DTYPES
from expertd.common.grouped import experts_of_rows
from expertd.errors import BadShapeError, UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.e4m3 import E4m3
from expertd_client.requests.grouped import Grouped
from expertd_client.requests.tensors import Synthetic, are_few_bytes, checked_dtype, wire_dtype

__all__ = ["Kind", "checked", "form_of", "gradients_refused", "refuse_gradients"]


class Kind:
    """What requests of the same types, dtypes and shapes share.

    dtypes, plain   as Request's
    form            of their message, where it has one
    submission      what the transports of expertd.shm.layout made of the first that was sent; None: none was"""

    __slots__ = ("dtypes", "form", "plain", "submission")

    def __init__(self, dtypes: tuple[int, ...], form: RequestForm | None = None, plain: bool = False) -> None:
        self.dtypes, self.form, self.plain = dtypes, form, plain
        self.submission: Any = None


_known: dict[object, Kind] = {}
"""What checked() found, by types, dtypes and shapes: callers send the same ones again and again."""
_KNOWN = 4096
"""Kept at once."""


def checked(hidden_states: Any, topk_ids: Any, topk_weights: Any, grouped: Grouped | None, output_dtype: Any) -> Kind:
    """That of a Request.  Raises what Request does."""
    if grouped is not None:
        return Kind(_check(hidden_states, topk_ids, topk_weights, grouped, output_dtype))
    try:
        key = (
            *(type(hidden_states), hidden_states.dtype, hidden_states.shape),
            *(type(topk_ids), topk_ids.dtype, topk_ids.shape),
            *(type(topk_weights), topk_weights.dtype, topk_weights.shape),
            output_dtype,
        )
        found = _known.get(key)
    except (AttributeError, TypeError):  # no tensor; _check() says so
        return Kind(_check(hidden_states, topk_ids, topk_weights, None, output_dtype))
    if found is None:
        dtypes = _check(hidden_states, topk_ids, topk_weights, None, output_dtype)
        if len(_known) >= _KNOWN:
            _known.clear()
        tensors = (hidden_states, topk_ids, topk_weights)
        few = (are_few_bytes(x, number) for x, number in zip(tensors, dtypes[1:], strict=True))
        plain = hidden_states.shape[0] > 0 and all(few)
        found = _known[key] = Kind(dtypes, form_of(dtypes, *tensors), plain)
    return found


def _check(
    hidden_states: Any, topk_ids: Any, topk_weights: Any, grouped: Grouped | None, output_dtype: Any
) -> tuple[int, ...]:
    hidden = checked_dtype(hidden_states, "hidden_states", HIDDEN_DTYPES)
    shape = hidden_states.shape
    if len(shape) != 2:
        raise BadShapeError.about("hidden_states", got=list(shape), want="[M, H]")
    answer = pb.DATA_TYPE_BF16 if hidden == pb.DATA_TYPE_E4M3 else hidden
    if output_dtype is not None:
        answer = pb.DATA_TYPE_E4M3 if output_dtype == "e4m3" else wire_dtype(output_dtype)
    if grouped is not None:
        _check_grouped(grouped, topk_ids, topk_weights, shape[0])
        return answer, hidden
    return answer, hidden, *_check_routes(topk_ids, topk_weights, shape[0])


def refuse_gradients(layer: int, hidden_states: Any, topk_weights: Any) -> None:
    """Raises UnsupportedCombinationError for torch tensors whose gradients torch would follow through the call."""
    follows = getattr(hidden_states, "requires_grad", False) or getattr(topk_weights, "requires_grad", False)
    if follows and sys.modules["torch"].is_grad_enabled():
        raise gradients_refused(
            layer, "inputs that require gradients", "call it under torch.inference_mode() or torch.no_grad()"
        )


def gradients_refused(layer: int, got: str, remedy: str) -> UnsupportedCombinationError:
    """Of whatever would need them."""
    return UnsupportedCombinationError.about(
        f"layer {layer}: remote experts", got=got, want="inference: a server computes no gradients", remedy=remedy
    )


def form_of(dtypes: tuple[int, ...], *tensors: Any) -> RequestForm | None:
    """None: not all three travel as raw bytes alone."""
    if any(isinstance(x, Synthetic | E4m3) for x in tensors):
        return None
    return _form(dtypes, *(tuple(x.shape) for x in tensors))


@lru_cache(maxsize=1024)
def _form(dtypes: tuple[int, ...], *shapes: tuple[int, ...]) -> RequestForm:
    return RequestForm(dtypes[0], *zip(dtypes[1:], shapes, strict=True))


def _check_routes(topk_ids: Any, topk_weights: Any, tokens: int) -> tuple[int, int]:
    """The DataTypes of both."""
    if topk_ids is None or topk_weights is None:
        raise _one_way("no topk_ids or no topk_weights")
    dtypes = (
        checked_dtype(topk_ids, "topk_ids", INT_DTYPES),
        checked_dtype(topk_weights, "topk_weights", FLOAT_DTYPES),
    )
    shape = topk_ids.shape
    if len(shape) != 2 or shape[0] != tokens:
        raise BadShapeError.about("topk_ids", got=list(shape), want=f"[{tokens}, top_k]")
    if topk_weights.shape != shape:
        want = f"the shape of topk_ids, {list(shape)}"
        raise BadShapeError.about("topk_weights", got=list(topk_weights.shape), want=want)
    return dtypes


def _check_grouped(grouped: Grouped, topk_ids: Any, topk_weights: Any, tokens: int) -> None:
    if topk_ids is not None or topk_weights is not None:
        raise _one_way("grouped with topk_ids or topk_weights")
    experts_of_rows(grouped, tokens)


def _one_way(got: str) -> BadShapeError:
    return BadShapeError.about("forward", got=got, want="topk_ids and topk_weights, or grouped alone")
