"""A gRPC server in front of another one, which hands every call on as it is, and notes which layers and experts were
asked for, when.  Nothing of the server or of its callers changes but the address.

Callers of the proxy have no sessions beside gRPC: what travels in shared memory or on TCP of its own is not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import grpc
import numpy as np
from numpy.typing import NDArray

from expertctl.load.recording import DRAWN, MOST_BYTES, Recording, bytes_of
from expertd.codec import ForwardRequestView, TensorView, decode_forward_request, decode_stream_request
from expertd.codec.values import Spelling
from expertd.common.grouped import experts_of_rows
from expertd.errors import BadShapeError, MalformedMessageError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.transports.address import parse_address, reach
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc import common
from expertd_client.transports.grpc.common import hidden_status
from expertd_client.transports.protocol import no_session

__all__ = ["Proxy", "Recorder"]

_NO_SESSION = "this call is recorded: its messages stay on the stream"
_UNARY = (
    *(
        common.path(m.name)
        for m in pb.DESCRIPTOR.services_by_name["ExpertService"].methods
        if not (m.client_streaming or m.server_streaming)
    ),
    "/grpc.health.v1.Health/Check",
)
"""Handed on as what they are: a stream that the server refuses at once may hide why (grpc_common.hidden_status)."""
_HEADER_BYTES = 16 << 20
"""Left of a file for its header."""
_OF_A_HOP = ("grpc-", "te", "user-agent", "content-type", ":")
"""Beginnings of metadata that gRPC makes itself."""


class Recorder:
    """Notes requests that a file can hold.  most: after so many, or when the file would be too large to be read,
    `full` is set, and no more are noted."""

    def __init__(self, most: int) -> None:
        self._most, self.full = most, asyncio.Event()
        self._at_ns: list[int] = []
        self._heads: list[tuple[int, int, int]] = []
        self._ids: list[NDArray[np.int32]] = []
        self._left = MOST_BYTES - _HEADER_BYTES

    def __len__(self) -> int:
        return len(self._heads)

    def note(self, v: ForwardRequestView, at_ns: int) -> None:
        """One request; what has no shape, or one that no server takes, is left to the server to refuse."""
        if self.full.is_set() or v.hidden_states is None or not v.hidden_states.shape:
            return
        tokens, top_k = v.hidden_states.shape[0], 1
        if v.grouped is None:
            if v.topk_ids is None or len(v.topk_ids.shape) != 2:
                return
            top_k = v.topk_ids.shape[1]
            if v.topk_ids.shape[0] != tokens:
                return
        nbytes = bytes_of(v.layer, tokens, top_k)
        ids = _ids(v, tokens) if nbytes else None  # sizes first: a message of a few bytes may say any
        if ids is None or len(ids) != tokens * top_k or (ids < DRAWN).any():
            return
        if nbytes > self._left:
            self.full.set()
            return
        self._left -= nbytes
        self._at_ns.append(at_ns)
        self._heads.append((v.layer, tokens, top_k))
        self._ids.append(ids)
        if len(self) >= self._most:
            self.full.set()

    def recording(self, described: pb.DescribeResponse) -> Recording:
        """Without requests for layers and experts that the server does not have: it refused them."""
        experts = {layer.layer: layer.num_experts for layer in described.layers}
        at = np.asarray(self._at_ns, np.int64)
        good = [n for n in np.argsort(at, kind="stable").tolist() if self._in(experts, n)]
        order = np.asarray(good, np.int64)
        heads = np.asarray(self._heads, np.int32).reshape(-1, 3)[order]
        ids = [self._ids[n] for n in order]
        return Recording(
            at_us=(at[order] - at.min(initial=np.iinfo(np.int64).max)) // 1000,
            layer=heads[:, 0],
            tokens=heads[:, 1],
            top_k=heads[:, 2],
            topk_ids=np.concatenate(ids) if ids else np.empty(0, np.int32),
            fingerprint=described.model.fingerprint,
            hidden_size=described.model.hidden_size,
            num_experts=experts,
        )

    def _in(self, experts: Mapping[int, int], n: int) -> bool:
        return int(self._ids[n].max(initial=-1)) < experts.get(self._heads[n][0], 0)


def _ids(v: ForwardRequestView, tokens: int) -> NDArray[np.int32] | None:
    """[routes], those that no int32 holds as the largest; None: they do not fit the rows."""
    if v.grouped is None:
        assert v.topk_ids is not None
        return _plain_ids(v.topk_ids)
    try:
        return _narrow(experts_of_rows(v.grouped, tokens))
    except BadShapeError:
        return None


def _narrow(ids: NDArray[Any]) -> NDArray[np.int32]:
    bounds = np.iinfo(np.int32)
    made: NDArray[np.int32] = np.clip(ids, bounds.min, bounds.max).astype(np.int32)
    return made


def _plain_ids(t: TensorView) -> NDArray[np.int32]:
    if t.spelling == Spelling.RAW:
        dtype = np.dtype("<i8" if t.dtype == pb.DATA_TYPE_I64 else "<i4")
        raw = np.frombuffer(t.raw, np.uint8)
        return _narrow(raw[: raw.size // dtype.itemsize * dtype.itemsize].view(dtype))
    if t.spelling == Spelling.INTS:
        return _narrow(np.asarray(t.ints, np.int64))
    return np.full(t.shape[0] * t.shape[1], DRAWN, np.int32)


class Proxy:
    """To the server at `address`, on `listen` ("host:port" of this host, port 0 = a free one; or "unix:/path")."""

    def __init__(self, address: str, listen: str, credentials: Credentials, recorder: Recorder) -> None:
        self._target, shown = reach(address, credentials)
        self._listen, self._recorder = listen, recorder
        secure, options = shown.channel(), common.channel_options(shown.options())
        self._metadata = shown.metadata()
        self._channel = (
            grpc.aio.insecure_channel(self._target, options)
            if secure is None
            else grpc.aio.secure_channel(self._target, secure, options)
        )
        self.address = ""
        self._hurry = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()

    def hurry(self) -> None:
        """From now on the end waits for no call that is open."""
        self._hurry.set()

    async def __aenter__(self) -> Proxy:
        """Raises OSError where the address cannot be had."""
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._server = grpc.aio.server(options=[*unlimited, ("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_Handler(self._call),))
        try:
            _try_bind(self._listen)
            port = self._server.add_insecure_port(self._listen)
        except (OSError, RuntimeError) as e:
            raise OSError(f"{self._listen}: cannot listen there: {getattr(e, 'strerror', None) or e}") from None
        await self._server.start()
        found = parse_address(self._listen) if not self._listen.endswith(":0") else None
        unix = found is not None and not found.host
        self.address = self._listen if unix else f"{self._listen.rpartition(':')[0]}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Open calls have a second.  Those that are cut off end before the event loop does: grpcio prints a traceback
        of what the loop cancels."""
        stopped, hurried = asyncio.create_task(self._server.stop(1.0)), asyncio.create_task(self._hurry.wait())
        await asyncio.wait([stopped, hurried], return_when=asyncio.FIRST_COMPLETED)
        if self._hurry.is_set():
            await self._server.stop(None)
        await stopped
        hurried.cancel()
        if calls := list(self._calls):
            await asyncio.wait(calls, timeout=10.0)
        await self._channel.close()

    async def _call(self, method: str, context: Any) -> None:
        """One call, whatever it is: messages there, messages back, and how it ended."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        metadata = [(k, v) for k, v in context.invocation_metadata() or () if not k.startswith(_OF_A_HOP)]
        if not any(k == "authorization" for k, _ in metadata):
            metadata += self._metadata
        more_of_it = {"timeout": context.time_remaining(), "metadata": metadata}
        hand_on = self._unary if method in _UNARY else self._stream
        try:
            code, text, more = await hand_on(method, context, more_of_it)
        except grpc.aio.AioRpcError as error:
            code, text, more = error.code(), error.details(), error.trailing_metadata()
            if hidden_status(error):
                code, text = grpc.StatusCode.UNAVAILABLE, "the call ended while a message was written; send again"
        trailing = tuple((k, v) for k, v in more or () if not k.startswith(_OF_A_HOP))
        if code is not grpc.StatusCode.OK:
            await context.abort(code, text or "", trailing)
        context.set_trailing_metadata(trailing)

    async def _unary(self, method: str, context: Any, more: dict[str, Any]) -> Any:
        data = await context.read()
        if data is grpc.aio.EOF:
            return grpc.StatusCode.CANCELLED, "no message came", ()
        if method == common.FORWARD:
            self._note(decode_forward_request, data)
        call = self._channel.unary_unary(method)(data, **more)
        await context.write(await call)
        return await call.code(), await call.details(), await call.trailing_metadata()

    async def _stream(self, method: str, context: Any, more: dict[str, Any]) -> Any:
        call = self._channel.stream_stream(method)(**more)
        writes = asyncio.Lock()

        async def answer(data: bytes) -> None:
            async with writes:
                await context.write(data)

        there = asyncio.create_task(self._bring(method, context, call, answer))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                await answer(cast(bytes, data))
            return await call.code(), await call.details(), await call.trailing_metadata()
        finally:
            there.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await there
            call.cancel()

    async def _bring(self, method: str, context: Any, call: Any, answer: Callable[[bytes], Any]) -> None:
        async for data in _messages(context):
            if method == common.STREAM_FORWARD:
                message = self._note(decode_stream_request, data)
                if isinstance(message, pb.SessionOffer):
                    said = pb.StreamForwardResponse(session=no_session(message, _NO_SESSION))
                    await answer(said.SerializeToString())
                    continue
            await call.write(data)
        await call.done_writing()

    def _note(self, decode: Callable[[bytes], Any], data: bytes) -> Any:
        at_ns = time.monotonic_ns()
        try:
            message = decode(data)
        except MalformedMessageError:
            return None  # the server says what is wrong with it
        if isinstance(message, ForwardRequestView):
            self._recorder.note(message, at_ns)
        return message


def _try_bind(listen: str) -> None:
    """Raises OSError where it is taken: gRPC would tell only its own log why."""
    host, _, port = listen.rpartition(":")
    if host == "unix":
        return
    family, kind, proto, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(where)


async def _messages(context: Any) -> AsyncIterator[bytes]:
    while (data := await context.read()) is not grpc.aio.EOF:
        yield data


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every method is a stream of bytes in both directions: on the wire a unary call is one as well."""

    def __init__(self, call: Callable[[str, Any], Any]) -> None:
        self._call = call

    def service(self, details: Any) -> Any:
        method = details.method

        async def handle(_: Any, context: Any) -> None:
            await self._call(method, context)

        return grpc.stream_stream_rpc_method_handler(handle)
