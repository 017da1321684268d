"""docs/errors.md: every reason of the error table (expertd.errors)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from expertd.errors import TABLE, ExpertdError, InvalidRequestError
from expertd_client.cluster.policy import Verdict, verdict

__all__ = ["markdown"]


def markdown(note: str) -> str:
    wrong = [e for e in TABLE.values() if issubclass(e, InvalidRequestError)]
    again = [e for e in TABLE.values() if e.retryable]
    rest = [e for e in TABLE.values() if e not in wrong and e not in again]
    elsewhere = [e for e in TABLE.values() if not e.retryable and verdict(e("")) is Verdict.ELSEWHERE]
    return f"""# Error reasons

{note}

An error has a stable `reason`, a gRPC status code, and a text. Programs match the reason or the class; the text may
change. In Python each reason is a class of `expertd.errors`, and all are `ExpertdError`:

```python
from expertd.errors import BadShapeError, ExpertdError

try:
    experts.forward(0, hidden_states, topk_ids, topk_weights)
except BadShapeError as error:
    print(error.message)                                        # subject, got, want, remedy
except ExpertdError as error:
    print(error.reason, error.retryable, error.retry_after_us)
```

On StreamForward an error is a `RequestError` message, and other requests of the stream go on. Any other call ends with
the status code and with trailing metadata: `expertd-reason`, `expertd-retryable` and, where the server has advice,
`expertd-retry-after-us`. There is no reason where gRPC itself ends a call: the deadline passed at the
client, or a message exceeds gRPC's limit.

## Try again later or at another replica
These are retryable. Nothing here has side effects, so a second try is safe. `ExpertClient(..., retry=Retry(...))` tries
again at its server, `ExpertCluster` at another replica, or after a pause at the same one.

{_table(again)}

These are not retryable, but of one server, so `ExpertCluster` asks another replica all the same:
{", ".join(f"`{e.reason}`" for e in elsewhere)}. If there is none, the call raises the error.

## The request is wrong
The same request fails at every replica with the same experts and limits. `LAYER_NOT_HELD`, `TOO_MANY_TOKENS`,
`MESSAGE_TOO_LARGE`, `OUTPUT_DTYPE_UNSUPPORTED` and `SCALES_UNSUPPORTED` depend on the server. These classes are also
`ValueError` (`InvalidRequestError`).

{_table(wrong)}

## Others

{_table(rest)}
"""


def _table(rows: Sequence[type[ExpertdError]]) -> str:
    return "\n".join(["| reason | status code | class | meaning |", "|---|---|---|---|", *_rows(rows)])


def _rows(rows: Sequence[type[ExpertdError]]) -> Iterator[str]:
    for row in rows:
        text = " ".join((inspect.getdoc(row) or "").split()).replace("|", r"\|")
        yield f"| `{row.reason}` | {row.code.name} | `{row.__name__}` | {text} |"
