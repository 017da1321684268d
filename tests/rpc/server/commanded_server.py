"""A servicer that a test commands, and the clients as the tests of the client use them."""

import asyncio
import contextlib
import queue
import threading
import time
from concurrent import futures

import grpc
import numpy as np

from expertd.errors import (
    ExpertdError,
    RequestCancelledError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as pb_grpc
from expertd_client import (
    AsyncExpertClient,
    ExpertClient,
)
from expertd_client.transports.protocol import no_session

PATIENCE_S = 20.0
"""How long a test waits for what must happen."""


def echo(request):
    """The answer of a server whose experts change nothing."""
    return pb.ForwardResponse(
        request_id=request.request_id,
        output=request.hidden_states,
        routes_computed=int(np.prod(request.topk_ids.shape)),
        timing=pb.Timing(kernel_ns=7, backend="echo"),
        load=pb.Load(queued_tokens=11),
        placement_epoch=5,
    )


class FakeServicer(pb_grpc.ExpertServiceServicer):
    """Does with each request what `on_forward(request, reply)` says; by default echoes it.

    reply takes a ForwardResponse, an ExpertdError for this request, a pb.Load unasked, or End for the whole stream.
    on_session(offer) answers an offer, or None; by default every transport is refused.
    seen, cancelled, offers: what came, in order
    """

    def __init__(self):
        self.on_forward = lambda request, reply: reply(echo(request))
        self.on_session = lambda offer: no_session(offer, "not here")
        self.seen, self.cancelled, self.offers, self.streams, self.describes = [], [], [], 0, []

    def wait_for(self, condition):
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, "it did not happen"
            time.sleep(0.002)

    def StreamForward(self, request_iterator, context):  # noqa: N802 - the contract's name
        self.streams += 1
        outbox = queue.SimpleQueue()

        def read():
            with contextlib.suppress(grpc.RpcError):
                for message in request_iterator:
                    if message.HasField("cancel"):
                        self.cancelled.append(message.cancel.request_id)
                        continue
                    if message.HasField("session"):
                        self.offers.append(message.session)
                        agreed = self.on_session(message.session)
                        if agreed is not None:
                            outbox.put((0, pb.StreamForwardResponse(session=agreed)))
                        continue
                    request = message.forward
                    self.seen.append(request)
                    self.on_forward(request, lambda answer, r=request: outbox.put((r.request_id, answer)))
            outbox.put((0, End()))

        threading.Thread(target=read, daemon=True).start()
        while True:
            request_id, answer = outbox.get()
            if isinstance(answer, End):
                if answer.code is not None:
                    context.set_trailing_metadata(answer.metadata)
                    context.abort(answer.code, "commanded")
                return
            if isinstance(answer, ExpertdError):
                yield pb.StreamForwardResponse(error=answer.to_request_error(request_id))
            elif isinstance(answer, pb.Load):
                yield pb.StreamForwardResponse(load=answer)
            elif isinstance(answer, pb.StreamForwardResponse):
                yield answer
            else:
                yield pb.StreamForwardResponse(forward=answer)

    def Forward(self, request, context):  # noqa: N802 - the contract's name
        self.seen.append(request)
        answers = queue.SimpleQueue()

        def ended():  # also at an ordinary end
            self.cancelled.append(request.request_id)
            answers.put(RequestCancelledError("the call is over"))

        context.add_callback(ended)
        self.on_forward(request, answers.put)
        answer = answers.get()
        while isinstance(answer, pb.Load):
            answer = answers.get()
        if isinstance(answer, ExpertdError):
            context.set_trailing_metadata(answer.to_trailing_metadata())
            context.abort(answer.code.grpc, answer.message)
        if isinstance(answer, End):
            context.abort(answer.code, "commanded")
        return answer

    def Describe(self, request, context):  # noqa: N802 - the contract's name
        self.describes.append(request)
        return pb.DescribeResponse(version="0.0.0", layers=[pb.Layer(layer=3)])


class End:
    """The end of the stream, or of a unary call: in order, or with a status."""

    def __init__(self, code=None, metadata=()):
        self.code, self.metadata = code, metadata


@contextlib.contextmanager
def serving(servicer, port=0, max_message_bytes=-1):
    server = grpc.server(
        futures.ThreadPoolExecutor(32),
        options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", 0)],
    )
    pb_grpc.add_ExpertServiceServicer_to_server(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(None).wait()


class InLoop:
    """AsyncExpertClient with the manners of ExpertClient: its loop runs in a thread.  server: also a function that
    makes a transport in that loop."""

    def __init__(self, server, **options):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def make():
            return AsyncExpertClient(server() if callable(server) else server, **options)

        self._client = self._run(make())

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def forward(self, *args, **kwargs):
        return self._run(self._client.forward(*args, **kwargs))

    def submit(self, *args, **kwargs):
        return asyncio.run_coroutine_threadsafe(self._client.forward(*args, **kwargs), self._loop)

    def describe(self, **kwargs):
        return self._run(self._client.describe(**kwargs))

    def session(self, **kwargs):
        return self._run(self._client.session(**kwargs))

    @property
    def in_flight(self):
        return self._client.in_flight

    @property
    def load(self):
        return self._client.load

    def close(self):
        if self._thread.is_alive():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


KINDS = {
    "sync-stream": (ExpertClient, {}),
    "async-stream": (InLoop, {}),
    "sync-unary": (ExpertClient, {"unary": True}),
    "async-unary": (InLoop, {"unary": True}),
}
STREAMS = [name for name, (_, options) in KINDS.items() if not options]


def connect(kind, server, **options):
    make, fixed = KINDS[kind]
    return make(server, **fixed, **options)


def batch(value=1.0, tokens=2, hidden=8, top_k=2):
    """Arguments of a forward to layer 3, every hidden state `value`."""
    ids = np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1))
    x = np.full((tokens, hidden), value, np.float32)
    return 3, x, ids, np.full((tokens, top_k), 0.5, np.float32)
