"""Something that forwards: takes the tokens of a layer and their routes, gives back the weighted sums of the experts.

    Forwarder         called from any thread: ExpertClient, over any transport
    AsyncForwarder    called in an event loop: AsyncExpertClient, over any transport

What stands on top (a load generator, a torch module, a cut through several servers) asks for one of the two and does
not know whether it talks to one server, to many, or to experts in its own process.  Whoever makes another one inherits
from the protocol and writes the methods for a Request; forward() and submit() come with it.
"""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from expertd_client.requests.request import Request, RequestOptions
from expertd_client.requests.result import ForwardResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from expertd_client.device.transport import DeviceTransport

__all__ = ["AsyncForwarder", "Forwarder"]

_Self = TypeVar("_Self", bound="Forwarder")
_AsyncSelf = TypeVar("_AsyncSelf", bound="AsyncForwarder")


@runtime_checkable
class Forwarder(Protocol):
    """Thread-safe.  Errors are the rows of expertd.errors."""

    def forward_request(self, request: Request, *, timeout_s: float | None = None) -> ForwardResult:
        """The answer.  timeout_s: for all of it, here and at the server; None = as this forwarder was made."""
        ...

    def submit_request(self, request: Request, *, timeout_s: float | None = None) -> Future[ForwardResult]:
        """The same without waiting.  The tensors may be overwritten as soon as this returns; cancel() takes the request
        back: it is dropped where its kernel has not begun."""
        ...

    def close(self) -> None:
        """Fails what is in flight with RequestCancelledError and gives back connections."""
        ...

    def device_transport(self, device: int) -> DeviceTransport | None:
        """How tensors on that GPU of this process reach the server without this host; None: it is not known."""
        return None

    def expect(self) -> None:
        """A forward comes within some 0.1 ms, from this thread: a server that sleeps may wake up meanwhile.  Does not
        wait, and raises nothing; where nobody can be told it does nothing."""
        return

    def forward(
        self,
        layer: int,
        hidden_states: Any,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> ForwardResult:
        """The routed experts of one layer for one batch of M tokens.

        hidden_states   [M, H] f32, f16 or bf16: numpy, torch on any device, or Synthetic
        topk_ids        [M, top_k] i32 or i64, global expert ids, -1 = no expert
        topk_weights    [M, top_k] f32, f16 or bf16
        timeout_s       for all of it, here and at the server; None = as this forwarder was made
        options         grouped, output_dtype, digest, traceparent, router_weight_on_input, weights_version: see Request

        Raises the errors of expertd.errors; UnsupportedCombinationError for tensors that require gradients.
        """
        request = Request(layer, hidden_states, topk_ids, topk_weights, **options)
        return self.forward_request(request, timeout_s=timeout_s)

    def submit(
        self,
        layer: int,
        hidden_states: Any,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Future[ForwardResult]:
        """forward() without waiting for the answer: the arguments are the same, the rest is as in submit_request."""
        request = Request(layer, hidden_states, topk_ids, topk_weights, **options)
        return self.submit_request(request, timeout_s=timeout_s)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@runtime_checkable
class AsyncForwarder(Protocol):
    """Called from one event loop.  A task that is cancelled while it waits takes its request back: it is dropped where
    its kernel has not begun."""

    async def forward_request(self, request: Request, *, timeout_s: float | None = None) -> ForwardResult:
        """As Forwarder.forward_request."""
        ...

    async def close(self) -> None:
        """As Forwarder.close."""
        ...

    async def forward(
        self,
        layer: int,
        hidden_states: Any,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> ForwardResult:
        """The routed experts of one layer for one batch: Forwarder.forward says what each argument is."""
        request = Request(layer, hidden_states, topk_ids, topk_weights, **options)
        return await self.forward_request(request, timeout_s=timeout_s)

    async def __aenter__(self: _AsyncSelf) -> _AsyncSelf:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
