"""RemoteExperts: the routed experts of one layer as a torch module whose weights live behind a Forwarder.

    experts = RemoteExperts(client, layer)                          # client: ExpertClient, or whatever forwards
    y = experts(hidden_states, topk_ids, topk_weights)

    started = experts.start(hidden_states, topk_ids, topk_weights)  # under way
    shared = shared_experts(hidden_states)                          # meanwhile
    y = experts.wait(started, shared) + shared

Tensors on a GPU of the server's host travel from GPU to GPU where that can be had (expertd_client.device.transport),
and then neither call waits on this process; else they go through its memory.

Both ways work inside torch.compile: each call is one node of the graph (expertd::forward, expertd::start,
expertd::wait), never taken apart.  There are no gradients.

Calls from GPU to GPU can be captured in a CUDA graph, after one call outside of it: by torch.cuda.graph as they are, by
torch.compile(mode="reduce-overhead") and other compilers with RemoteExperts(..., graphs=True).  A replay cannot raise:
where the server has ended it answers NaN, and experts.check() raises.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from expertd.errors import (
    BadDtypeError,
    BadResponseError,
    BadShapeError,
    UnsupportedCombinationError,
    WeightsVersionNotHeldError,
)
from expertd_client.clients.forwarder import AsyncForwarder, Forwarder
from expertd_client.cluster.result import ClusterResult
from expertd_client.device.transport import DeviceTransport
from expertd_client.requests.checks import gradients_refused, refuse_gradients
from expertd_client.requests.request import Request
from expertd_client.requests.result import FIRST_VERSION, ForwardResult
from expertd_client.requests.step_version import StepVersion
from expertd_client.tracing import recorder

__all__ = ["RemoteExperts", "Started"]

_T = TypeVar("_T")

_MODULES: weakref.WeakValueDictionary[int, RemoteExperts] = weakref.WeakValueDictionary()
"""By number: what the nodes of a compiled graph carry."""
_NUMBERS = itertools.count(1)


class Started(NamedTuple):
    """A call under way, for wait(), once.  ticket: [] i64; hidden_states: those of start()."""

    ticket: Tensor
    hidden_states: Tensor


class _Call(NamedTuple):
    """What one call sends.  rows: [M] bool of the tokens that travel, None = all; routes: how many must be computed, or
    how many places for them topk_ids has, where nobody has looked at their values."""

    requests: list[Request]
    rows: Tensor | None
    routes: int
    looked: bool = True


class RemoteExperts(torch.nn.Module):
    """The routed experts of one layer.  It has no parameters; several modules may share a forwarder.  Threads may call
    it at the same time; they share the attributes below, so with a StepVersion each has modules of its own.

    forwarder    whatever forwards; it stays the caller's and is not closed here
    layer        index of the layer in the model, as the server counts
    max_tokens   of one request; larger batches are cut.  A server's limit stands in Describe; its default is this one
    timeout_s    of each call; None = as the forwarder was made
    graphs       whether torch.compile may capture the calls in CUDA graphs; without it graphs are split around them

    weights_version        of the weights that calls ask for from now on; 0 = whichever is served; a StepVersion, which
                           all layers of a model share = the one of the step.  May be set between calls.  Calls with one
                           go through this process's memory, not from GPU to GPU, and not into CUDA graphs
    weights_version_seen   that computed the answer of the last call; 0 = it has none yet, it had no routes, or it went
                           from GPU to GPU, where the version is not told

    hidden_states   [..., H] f64, f32, f16 or bf16 on any device; f64 travels as f32
    topk_ids        [..., top_k] of any integer dtype, global expert ids; -1 = no expert: a token that has nothing else
                    gets zeros.  It is not sent, unless the last call had the same shapes and no -1
    topk_weights    [..., top_k] f64, f32, f16 or bf16
    returns         the sum over a token's routes, in the shape, dtype and device of hidden_states

    Raises the errors of expertd.errors: BadResponseError if no server computed a route (none holds that expert),
    UnsupportedCombinationError for gradients, for capture in a CUDA graph while the call cannot go from GPU to GPU, and
    when it is made for a client of asyncio.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        layer: int,
        *,
        max_tokens: int = 4096,
        timeout_s: float | None = None,
        graphs: bool = False,
        weights_version: int | StepVersion = 0,
    ) -> None:
        super().__init__()
        if isinstance(forwarder, AsyncForwarder):
            raise UnsupportedCombinationError.about(
                "forwarder",
                got=f"a {type(forwarder).__name__}",
                want="one without asyncio: ExpertClient, ExpertCluster or another Forwarder",
            )
        if max_tokens < 1:
            raise ValueError(f"max_tokens: got {max_tokens}, want >= 1")
        self.forwarder = forwarder
        self.layer = layer
        self.max_tokens = max_tokens
        self.timeout_s = timeout_s
        self.graphs = graphs
        self.weights_version = weights_version
        self.weights_version_seen = 0
        self._under_way: dict[int, Callable[[Tensor], Tensor]] = {}
        self._tickets = itertools.count(1)
        # what the tensors of a call were, it without them, and how many routes it had
        self._last: tuple[object, Request | None, int] = None, None, 0
        self._number = next(_NUMBERS)
        _MODULES[self._number] = self

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Sends, and waits for the answer."""
        if self.training or torch.is_grad_enabled():
            self._refuse_gradients(hidden_states, topk_weights)
        if torch.compiler.is_compiling():
            op = torch.ops.expertd.forward_in_graph if self.graphs else torch.ops.expertd.forward
            answer: Tensor = op(hidden_states, topk_ids, topk_weights, self._number)
            return answer
        return self._forward(hidden_states, topk_ids, topk_weights)

    def start(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Started:
        """Sends without waiting.  The tensors may be overwritten as soon as this returns."""
        if self.training or torch.is_grad_enabled():
            self._refuse_gradients(hidden_states, topk_weights)
        if torch.compiler.is_compiling():
            ticket = torch.ops.expertd.start(hidden_states, topk_ids, topk_weights, self._number)
        else:
            ticket = self._start(hidden_states, topk_ids, topk_weights)
        return Started(ticket, hidden_states)

    def wait(self, started: Started, after: Tensor | None = None) -> Tensor:
        """The answer to start(); each is fetched once.  after: what is computed meanwhile; its values do not matter,
        but without it torch.compile may move the waiting before that work."""
        if torch.compiler.is_compiling():
            answer: Tensor = torch.ops.expertd.wait(started.ticket, started.hidden_states, after, self._number)
            return answer
        return self._wait(started.ticket, started.hidden_states)

    def check(self, device: int | None = None) -> None:
        """Raises what replays of captured calls met: UnavailableError where their server has ended, or why it refused
        one since the last check.  Synchronize first.  device: index of the callers' GPU; None = the current one, where
        there is one: else there are no replays, and it does nothing."""
        if device is None and not torch.cuda.is_available():
            return
        transport = self.forwarder.device_transport(torch.cuda.current_device() if device is None else device)
        if transport is not None:
            transport.check()

    def extra_repr(self) -> str:
        """What print(module) shows."""
        return f"layer={self.layer}, max_tokens={self.max_tokens}"

    def _forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self._sees(0)
        now = recorder.active
        if now is None:
            return self._experts(hidden_states, topk_ids, topk_weights)
        return now.module("experts", self.layer, lambda: self._experts(hidden_states, topk_ids, topk_weights))

    def _experts(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        device = _gpu_of(hidden_states)
        if device is not None:
            batch = hidden_states, topk_ids, topk_weights
            out = self._between_gpus(device, batch, lambda transport: transport.forward)
            if out is not None:
                return out.to(hidden_states.dtype).view(hidden_states.shape)
        self.forwarder.expect()  # checks and copies take as long as its waking: decision 178
        call = self._call(hidden_states, topk_ids, topk_weights)
        if len(call.requests) == 1:
            answers = [self.forwarder.forward_request(call.requests[0], timeout_s=self.timeout_s)]
        else:
            answers = _results(self._submit(call))
        if not call.looked and answers[0].routes_computed != call.routes:
            call = self._looked(call, topk_ids)
        return self._joined(call, answers, hidden_states)

    def _start(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self._sees(0)
        now = recorder.active
        if now is None:
            return self._begin(hidden_states, topk_ids, topk_weights)
        return now.module("start", self.layer, lambda: self._begin(hidden_states, topk_ids, topk_weights))

    def _begin(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        ticket = next(self._tickets)
        device = _gpu_of(hidden_states)
        if device is not None:
            batch = hidden_states, topk_ids, topk_weights
            fetch = self._between_gpus(device, batch, lambda transport: transport.start)
            if fetch is not None:
                self._under_way[ticket] = lambda like: fetch().to(like.dtype).view(like.shape)
                return torch.tensor(ticket)
        self.forwarder.expect()
        call = self._call(hidden_states, topk_ids, topk_weights)
        futures = self._submit(call)
        if not call.looked:  # as long as the ids are there
            call = self._looked(call, topk_ids)
        call = self._kept(call)
        self._under_way[ticket] = lambda like: self._joined(call, _results(futures), like)
        return torch.tensor(ticket)

    def _wait(self, ticket: Tensor, like: Tensor) -> Tensor:
        fetch = self._under_way.pop(int(ticket), None)
        if fetch is None:
            raise UnsupportedCombinationError.about(
                f"layer {self.layer}: wait", got="a call that was fetched already", want="each start() fetched once"
            )
        now = recorder.active
        if now is None:
            return fetch(like)
        return now.module("wait", self.layer, lambda: fetch(like))

    def _between_gpus(
        self,
        device: int,
        batch: tuple[Tensor, Tensor, Tensor],
        act: Callable[[DeviceTransport], Callable[[int, Tensor, Tensor, Tensor, float | None], _T | None]],
    ) -> _T | None:
        """What forward or start of the transport, which `act` chooses, says to a batch on GPU number `device`.  None:
        it must go through this process; raises UnsupportedCombinationError where it cannot."""
        transport = None if self.weights_version else self.forwarder.device_transport(device)
        if transport is not None:
            found = act(transport)(self.layer, *self._for_the_device(*batch), self.timeout_s)
            if found is not None:
                return found
        self._refuse_capture(transport)
        return None

    def _for_the_device(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._check_shapes(x, topk_ids, topk_weights)
        tokens = x.shape[:-1].numel()
        ids, weights = (_flat(t.to(x.device), tokens) for t in (topk_ids, topk_weights))
        return _for_the_wire(_flat(x, tokens)), _as_ids(ids), _for_the_wire(weights)

    def _submit(self, call: _Call) -> list[Future[ForwardResult]]:
        return [self.forwarder.submit_request(request, timeout_s=self.timeout_s) for request in call.requests]

    def _refuse_gradients(self, hidden_states: Tensor, topk_weights: Tensor) -> None:
        if self.training:
            raise gradients_refused(self.layer, "a module in training", "call model.eval()")
        refuse_gradients(self.layer, hidden_states, topk_weights)

    def _refuse_capture(self, transport: DeviceTransport | None) -> None:
        """What goes through this process cannot be in a CUDA graph."""
        if not torch.cuda.is_current_stream_capturing():
            return
        reason = "no session from GPU to GPU" if transport is None or not transport.reason else transport.reason
        if self.weights_version:
            reason = f"weights_version={self.weights_version!r}, whose calls do not go from GPU to GPU"
        raise UnsupportedCombinationError.about(
            f"layer {self.layer}: a CUDA graph that is captured",
            got=reason,
            want="one server on this host that holds all experts of the layer, on another GPU",
            remedy="call the module once before the capture, or capture without it",
        )

    def _check_shapes(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        batch = hidden_states.shape[:-1]
        if topk_ids.shape[:-1] != batch or topk_weights.shape != topk_ids.shape:
            raise BadShapeError.about(
                f"layer {self.layer}: topk_ids and topk_weights",
                got=f"{list(topk_ids.shape)} and {list(topk_weights.shape)} to {list(hidden_states.shape)}",
                want=f"both [{', '.join(map(str, batch))}, top_k]",
            )

    def _call(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> _Call:
        kinds = (
            *(hidden_states.shape, topk_ids.shape, topk_weights.shape),
            *(hidden_states.dtype, topk_ids.dtype, topk_weights.dtype),
            *(self.layer, self.max_tokens, self._asked_version()),
        )
        known, sent, routes = self._last
        if sent is not None and kinds == known and topk_ids.is_cpu:
            return _Call([sent.again(hidden_states, topk_ids, topk_weights)], None, routes, False)
        call = self._checked_call(hidden_states, topk_ids, topk_weights)
        if len(call.requests) == 1:
            sent = call.requests[0]
            travel = sent.hidden_states, sent.topk_ids, sent.topk_weights
            same = all(a is b for a, b in zip(travel, (hidden_states, topk_ids, topk_weights), strict=True))
            if same and call.routes == topk_ids.numel():
                self._last = kinds, sent.again(None, None, None), topk_ids.numel()
        return call

    def _looked(self, call: _Call, topk_ids: Tensor) -> _Call:
        """With the number of its routes.  Where they are not all there the next call is looked at before it is sent."""
        routes = int((topk_ids != -1).sum())
        if routes != call.routes:
            self._last = None, None, 0
        return call._replace(routes=routes)

    def _checked_call(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> _Call:
        self._check_shapes(hidden_states, topk_ids, topk_weights)
        x, ids, weights = hidden_states, topk_ids, topk_weights
        if x.dim() != 2:
            tokens = x.shape[:-1].numel()
            x, ids, weights = _flat(x, tokens), _flat(ids, tokens), _flat(weights, tokens)
        ids = _as_ids(ids if ids.is_cpu else ids.cpu())  # small, and their values are needed here
        routes, rows = ids.numel(), None
        if routes and int(ids.min()) < 0:  # others below -1 travel, and the server refuses them
            routed = ids != -1
            routes, has = int(routed.sum()), routed.any(1)
            if not bool(has.all()):
                rows = has
                x, ids, weights = x[has.to(x.device)], ids[has], weights[has.to(weights.device)]
        request = None
        if routes:
            version = self._asked_version()
            request = Request(self.layer, _for_the_wire(x), ids, _for_the_wire(weights), weights_version=version)
        return _Call([] if request is None else request.cut(self.max_tokens), rows, routes)

    def _joined(self, call: _Call, answers: list[ForwardResult], like: Tensor) -> Tensor:
        """The answers as one tensor in the shape, dtype and device of `like`."""
        if len(answers) != 1 or isinstance(self.weights_version, StepVersion):
            answers = self._of_one_version(call, answers)
        if answers:
            self._sees(answers[0].weights_version)
        if len(answers) == 1 and call.rows is None and answers[0].routes_computed == call.routes:  # as nearly always
            output: Tensor = answers[0].output
            return output if output.dtype == like.dtype and like.dim() == 2 else output.to(like.dtype).view(like.shape)
        computed = sum(answer.routes_computed for answer in answers)
        computed += sum(len(a.missing) for a in answers if isinstance(a, ClusterResult))  # its caller chose OnMissing
        if computed != call.routes:
            raise BadResponseError.about(
                f"layer {self.layer}: routes computed",
                got=computed,
                want=f"{call.routes}, each by one server",
                remedy="an expert is held by nobody: name servers for all of them",
            )
        outputs = [answer.output for answer in answers]
        whole = torch.cat(outputs).to(like.dtype) if outputs else like.new_zeros(0, like.shape[-1])
        if call.rows is not None:
            sent, whole = whole, like.new_zeros(len(call.rows), like.shape[-1])
            whole[call.rows.to(whole.device)] = sent
        for answer in answers:
            answer.release()
        return whole.view(like.shape)

    # ---- versions of the weights -------------------------------------------------------------------------------------

    def _sees(self, version: int) -> None:
        self.__dict__["weights_version_seen"] = version  # torch makes assignments to a module slow

    def _asked_version(self) -> int:
        """What a call asks for now.  In a compiled graph this runs inside of its node: decision 180."""
        version = self.weights_version
        return version.number if isinstance(version, StepVersion) else version

    def _kept(self, call: _Call) -> _Call:
        """With tensors of its own, where wait() may have to ask again: the caller overwrites his meanwhile."""
        parts = call.requests
        if not parts or parts[0].weights_version:
            return call
        if len(parts) == 1 and not isinstance(self.weights_version, StepVersion):
            return call
        copies = [r.with_tensors(r.hidden_states.clone(), r.topk_ids.clone(), r.topk_weights.clone()) for r in parts]
        return call._replace(requests=copies)

    def _of_one_version(self, call: _Call, answers: list[ForwardResult]) -> list[ForwardResult]:
        """Answers of the version of the step, or where there is no StepVersion, of the newest one that computed a part
        of the call: parts that another one computed are asked for once more."""
        got = max((answer.weights_version or FIRST_VERSION for answer in answers), default=None)
        step = self.weights_version if isinstance(self.weights_version, StepVersion) else None
        if step is not None:
            step.answered(got)
        if got is None:
            return answers
        version, out = got if step is None else step.number, []
        for request, answer in zip(call.requests, answers, strict=True):
            if (answer.weights_version or FIRST_VERSION) != version:
                answer.release()
                answer = self._asked_again(request.pinned(version), got)
            out.append(answer)
        return out

    def _asked_again(self, request: Request, got: int) -> ForwardResult:
        """got: the version that answered."""
        try:
            return self.forwarder.forward_request(request, timeout_s=self.timeout_s)
        except WeightsVersionNotHeldError as error:
            if got >= request.weights_version:
                raise
            raise WeightsVersionNotHeldError.about(
                f"layer {self.layer}: version of the weights",
                got=got,
                want=f"{request.weights_version}, which the steps before had, or other ranks have",
                remedy=f"after a rollback set StepVersion.least to 0; {error.message}",
            ) from error


def _results(futures: list[Future[ForwardResult]]) -> list[ForwardResult]:
    """All, or the first error, and the others taken back."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _flat(x: Tensor, rows: int) -> Tensor:
    """[rows, last extent]."""
    return x if x.dim() == 2 else x.reshape(rows, x.shape[-1])


def _as_ids(x: Tensor) -> Tensor:
    if x.is_floating_point():
        raise BadDtypeError.about("topk_ids", got=f"dtype {x.dtype}", want="an integer dtype")
    return x if x.dtype in (torch.int32, torch.int64) else x.long()


def _gpu_of(x: Tensor) -> int | None:
    return x.device.index if x.is_cuda and torch.version.hip is None else None


def _for_the_wire(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


_ONE_NODE = [tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None]
"""What their host code needs where torch knows it: CUDA graphs are split around them."""
_ARGUMENTS = "(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, int module) -> Tensor"


@torch.library.custom_op("expertd::forward", mutates_args=(), schema=_ARGUMENTS, tags=_ONE_NODE)
def _forward_op(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, module: int) -> Tensor:
    return _MODULES[module]._forward(hidden_states, topk_ids, topk_weights)


@_forward_op.register_fake
def _(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, module: int) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


@torch.library.custom_op("expertd::forward_in_graph", mutates_args=(), schema=_ARGUMENTS)
def _forward_in_graph_op(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, module: int) -> Tensor:
    return _MODULES[module]._forward(hidden_states, topk_ids, topk_weights)


@_forward_in_graph_op.register_fake
def _(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, module: int) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


@torch.library.custom_op("expertd::start", mutates_args=(), schema=_ARGUMENTS, tags=_ONE_NODE)
def _start_op(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, module: int) -> Tensor:
    return _MODULES[module]._start(hidden_states, topk_ids, topk_weights)


@_start_op.register_fake
def _(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, module: int) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "expertd::wait",
    mutates_args=(),
    schema="(Tensor ticket, Tensor hidden_states, Tensor? after, int module) -> Tensor",
    tags=_ONE_NODE,
)
def _wait_op(ticket: Tensor, hidden_states: Tensor, after: Tensor | None, module: int) -> Tensor:
    return _MODULES[module]._wait(ticket, hidden_states)


@_wait_op.register_fake
def _(ticket: Tensor, hidden_states: Tensor, after: Tensor | None, module: int) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)
