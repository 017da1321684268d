"""`expertctl bench codec`: what the codec costs on top of a bare stream of bytes, and what it saves against protobuf.

Three echo servers live in one child process, each a grpc.aio bidirectional stream over loopback:

    expertd    bytes -> decode_stream_request -> encode_stream_response with the same bytes as output
    bytes      bytes -> the same bytes
    protobuf   the stock generated servicer and messages

The client, in this process, does the same on its side: our codec, nothing, the generated classes.  One message is in
flight; a time is from before the request is encoded until the answer's tensor can be read.  The variants take turns
message by message, so that whatever else the machine does hits all three; a cell is the median.  The bytes and the
expertd stream are the same generic handlers and calls, and all three servers share a process, an event loop and a tuned
allocator, so that nothing but the codec differs.  A request of ours and of protobuf carries the ids and weights of its
tokens on top of the hidden states (1.6 % more bytes); the bare stream carries the hidden states alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from expertctl.common.brief import briefly
from expertctl.common.child import child_server
from expertctl.common.columns import Column, table_of
from expertctl.common.counts import at_least_0
from expertd import codec
from expertd.common.hostmem import tune_allocator
from expertd.common.tables import console, print_table
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as pb_grpc

__all__ = ["COLUMNS", "CodecMeasurement", "add_arguments", "run", "run_command"]

SIZES = tuple(1 << bits for bits in range(13, 25))
"""8 KiB to 16 MiB of hidden states."""

HIDDEN_SIZE = 2048
TOP_K = 8
"""The shapes of one layer of Qwen3-30B-A3B: two bytes an element, 8 routes a token."""

OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

COLUMNS = (
    Column("bytes", "of the hidden states in a message"),
    Column("expertd", "microseconds of one round trip with expertd's codec, a median", "expertd_us"),
    Column("bytes stream", "the same bytes over the same stream without a codec", "bytes_stream_us"),
    Column("protobuf", "the same tensors with protobuf's own classes", "protobuf_us"),
    Column("vs bytes stream", "expertd / bytes stream, what is above 1 is the codec's cost", "ratio_vs_bytes_stream"),
    Column("vs protobuf", "expertd / protobuf, below 1 expertd is faster", "ratio_vs_protobuf"),
)

_EOF: Any = vars(grpc.aio)["EOF"]  # grpc's type stubs do not know it

Echo = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class CodecMeasurement:
    """One size.  Microseconds of one round trip, medians."""

    bytes: int
    expertd_us: float
    bytes_stream_us: float
    protobuf_us: float
    ratio_vs_bytes_stream: float
    ratio_vs_protobuf: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `expertctl bench codec`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=SIZES,
        metavar="N,N,...",
        help="sizes of a tensor in bytes (default: 8 KiB to 16 MiB)",
    )
    parser.add_argument(
        "--seconds",
        type=at_least_0,
        default=briefly(2.0, 0.02),
        metavar="S",
        help="seconds for each size (default: 2)",
    )
    parser.add_argument("--untuned", action="store_true", help="do not tune the C allocator")


def run_command(args: argparse.Namespace) -> int:
    """Runs it and prints.  Returns the exit code."""
    rows = run(args.sizes, seconds=args.seconds, tune=not args.untuned)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return 0
    table = table_of(COLUMNS, "one echo over a stream, microseconds")
    for r in rows:
        times = (f"{t:,.0f}" for t in (r.expertd_us, r.bytes_stream_us, r.protobuf_us))
        table.add_row(f"{r.bytes:,}", *times, f"{r.ratio_vs_bytes_stream:.2f}x", f"{r.ratio_vs_protobuf:.2f}x")
    print_table(console(), table)
    return 0


def run(sizes: Sequence[int] = SIZES, *, seconds: float = 2.0, tune: bool = True) -> list[CodecMeasurement]:
    """Measures each size for about `seconds`.  Starts the server process and ends it.

    sizes  bytes of hidden states, multiples of 4096 (rows of [M, 2048] bf16)
    """
    if tune:
        tune_allocator()
    with _server_process(tune) as ports:
        return asyncio.run(_measure(ports, sizes, seconds))


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if any(size < 1 or size % (2 * HIDDEN_SIZE) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"got {text}, want multiples of {2 * HIDDEN_SIZE}: rows of [M, {HIDDEN_SIZE}] bf16"
        )
    return sizes


# ---- client ----------------------------------------------------------------------------------------------------------


async def _measure(ports: dict[str, int], sizes: Sequence[int], seconds: float) -> list[CodecMeasurement]:
    async with contextlib.AsyncExitStack() as stack:
        streams = {}
        for name, open_stream in (("expertd", _raw_stream), ("bytes", _raw_stream), ("protobuf", _protobuf_stream)):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{ports[name]}", options=OPTIONS)
            streams[name] = open_stream(await stack.enter_async_context(channel))
        rows = []
        for size in sizes:
            echoes = (
                _expertd_echo(streams["expertd"], size),
                _bytes_echo(streams["bytes"], size),
                _protobuf_echo(streams["protobuf"], size),
            )
            ours, bare, stock = await _medians_us(echoes, seconds)
            ratios = (round(ours / bare, 3), round(ours / stock, 3))
            rows.append(CodecMeasurement(size, round(ours, 1), round(bare, 1), round(stock, 1), *ratios))
        for stream in streams.values():
            await stream.done_writing()
            await stream.read()
        return rows


async def _medians_us(echoes: Sequence[Echo], seconds: float) -> list[float]:
    """Median time of each, taking turns for `seconds`; at least 5 turns after 2 that do not count."""
    times: list[list[float]] = [[] for _ in echoes]
    for _ in range(2):
        for echo in echoes:
            await echo()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for echo, series in zip(echoes, times, strict=True):
            start = time.perf_counter()
            await echo()
            series.append(time.perf_counter() - start)
    return [statistics.median(series) * 1e6 for series in times]


def _raw_stream(channel: grpc.aio.SessionTransport) -> Any:
    return channel.stream_stream("/expertd.v1.ExpertService/StreamForward")()


def _protobuf_stream(channel: grpc.aio.SessionTransport) -> Any:
    return pb_grpc.ExpertServiceStub(channel).StreamForward()  # type: ignore[no-untyped-call]


def _tensors(size: int) -> list[tuple[int, tuple[int, int], bytes]]:
    """(dtype, shape, bytes) of hidden states, ids and weights."""
    tokens = size // (2 * HIDDEN_SIZE)
    routes = bytes(range(256)) * (-(-tokens * TOP_K * 4 // 256))
    routes = routes[: tokens * TOP_K * 4]
    hidden = (bytes(range(256)) * (size // 256 + 1))[:size]
    return [
        (pb.DATA_TYPE_BF16, (tokens, HIDDEN_SIZE), hidden),
        (pb.DATA_TYPE_I32, (tokens, TOP_K), routes),
        (pb.DATA_TYPE_F32, (tokens, TOP_K), routes),
    ]


def _check(got: int, want: int) -> None:
    if got != want:
        raise RuntimeError(f"echo: got {got} bytes, want {want}")


def _expertd_echo(stream: Any, size: int) -> Echo:
    hidden, ids, weights = (codec.TensorView.of_raw(*t) for t in _tensors(size))

    async def echo() -> None:
        await stream.write(codec.encode_stream_request(codec.ForwardRequestView(1, 17, hidden, ids, weights)))
        answer = codec.decode_stream_response(await stream.read())
        assert isinstance(answer, codec.ForwardResponseView)
        assert answer.output is not None
        _check(len(answer.output.raw), size)

    return echo


def _bytes_echo(stream: Any, size: int) -> Echo:
    payload = _tensors(size)[0][2]

    async def echo() -> None:
        await stream.write(payload)
        _check(len(await stream.read()), size)

    return echo


def _protobuf_echo(stream: Any, size: int) -> Echo:
    hidden, ids, weights = _tensors(size)

    async def echo() -> None:
        request = pb.ForwardRequest(
            request_id=1,
            layer=17,
            hidden_states=_pb_tensor(*hidden),
            topk_ids=_pb_tensor(*ids),
            topk_weights=_pb_tensor(*weights),
        )
        await stream.write(pb.StreamForwardRequest(forward=request))
        answer = await stream.read()
        _check(len(answer.forward.output.raw), size)

    return echo


def _pb_tensor(dtype: int, shape: tuple[int, ...], raw: bytes) -> pb.Tensor:
    return pb.Tensor(dtype=dtype, shape=shape, raw=raw)  # type: ignore[arg-type]  # an enum is an int


# ---- server ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server_process(tune: bool) -> Any:
    """Ports by variant, while the child lives.  The child ends when its standard input is closed."""
    words = () if tune else ("--untuned",)
    with child_server("echo server", "expertctl.bench.codec", "--serve", *words) as line:
        yield json.loads(line)


async def _serve() -> None:
    servers = {
        "expertd": _generic(_serve_expertd),
        "bytes": _generic(_serve_bytes),
        "protobuf": grpc.aio.server(options=OPTIONS),
    }
    pb_grpc.add_ExpertServiceServicer_to_server(_Stock(), servers["protobuf"])  # type: ignore[no-untyped-call]
    ports = {}
    for name, server in servers.items():
        ports[name] = server.add_insecure_port("127.0.0.1:0")
        await server.start()
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for server in servers.values():
        await server.stop(0)


def _generic(handler: Any) -> grpc.aio.Server:
    server = grpc.aio.server(options=OPTIONS)
    methods = {"StreamForward": grpc.stream_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("expertd.v1.ExpertService", methods),))
    return server


async def _serve_expertd(_: AsyncIterator[bytes], context: Any) -> None:
    while await _echoed(context, _expertd_answer):
        pass


async def _serve_bytes(_: AsyncIterator[bytes], context: Any) -> None:
    while await _echoed(context, lambda data: data):
        pass


async def _echoed(context: Any, answer: Callable[[Any], Any]) -> bool:
    """Answers one message; False = there was none.  Nothing of it is alive when the next one is read."""
    data = await context.read()
    if data is _EOF:
        return False
    await context.write(answer(data))
    return True


def _expertd_answer(data: bytes) -> bytes:
    request = codec.decode_stream_request(data)
    assert isinstance(request, codec.ForwardRequestView)
    return codec.encode_stream_response(codec.ForwardResponseView(request.request_id, request.hidden_states))


def _protobuf_answer(message: pb.StreamForwardRequest) -> pb.StreamForwardResponse:
    x = message.forward.hidden_states
    output = pb.Tensor(dtype=x.dtype, shape=x.shape, raw=x.raw)
    return pb.StreamForwardResponse(forward=pb.ForwardResponse(request_id=message.forward.request_id, output=output))


class _Stock(pb_grpc.ExpertServiceServicer):
    async def StreamForward(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 - the contract's name
        while await _echoed(context, _protobuf_answer):
            pass


def main() -> int:
    """The child's entry; also runs the benchmark alone."""
    parser = argparse.ArgumentParser(prog="python -m expertctl.bench.codec", description=__doc__, allow_abbrev=False)
    parser.add_argument("--serve", action="store_true", help="be the child: print the ports, serve until input ends")
    add_arguments(parser)
    args = parser.parse_args()
    if not args.serve:
        return run_command(args)
    if not args.untuned:
        tune_allocator()
    asyncio.run(_serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
