"""A client of a session over TCP in Python: the twin of expertd/tcp/csrc/client.cpp, which can also send what that
never would."""

import socket
import struct

import numpy as np

from expertd.codec import ForwardRequestView, TensorView, decode_stream_response, encode_stream_request
from expertd.tcp.entry import enter, parse_endpoint
from expertd.v1 import expert_service_pb2 as pb

HEAD = struct.Struct("<4sIII")
MAGIC = b"exf1"


class Twin:
    """One session.  Messages are values of expertd.codec.  caller: "" = one of its own."""

    def __init__(self, listener, caller=""):
        token, endpoint, why = listener.offer(caller or f"caller {id(self)}", "")
        assert not why
        self.sock = dial(endpoint)
        self.most_bytes = enter(self.sock, token, 10)
        self.sock.settimeout(10)
        self.sent = self.received = 0

    def send(self, message):
        self.send_bytes(encode_stream_request(message))

    def send_bytes(self, data, **head):
        self.sock.sendall(self.frame(data, **head))

    def frame(self, data, magic=MAGIC, length=None, sequence=None, lead=0):
        self.sent += 1
        length, sequence = (n if given is None else given for n, given in ((len(data), length), (self.sent, sequence)))
        return HEAD.pack(magic, length, sequence, lead) + data

    def receive(self):
        """The next message; None: the server has ended the session."""
        head = self._exactly(HEAD.size)
        if not head:
            return None
        magic, length, sequence, lead = HEAD.unpack(head)
        self.received += 1
        assert (magic, sequence) == (MAGIC, self.received)
        data = self._exactly(length)
        message = decode_stream_response(data)
        if getattr(message, "output", None) is not None and message.output.raw.nbytes:
            assert data[lead : lead + 64] == bytes(message.output.raw[:64])
        return message

    def ended(self):
        """Whether the server ends the session, and says nothing before."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def _exactly(self, n):
        data = b""
        while len(data) < n:
            try:
                more = self.sock.recv(n - len(data))
            except ConnectionError:
                more = b""
            if not more:
                assert not data, "it ended inside a frame"
                return b""
            data += more
        return data

    def close(self):
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def dial(endpoint):
    where = parse_endpoint(endpoint)
    return socket.create_connection((where.host or "127.0.0.1", where.port), 10)


NUMBERS = {"f32": pb.DATA_TYPE_F32, "f16": pb.DATA_TYPE_F16, "i32": pb.DATA_TYPE_I32, "i64": pb.DATA_TYPE_I64}
ARRAYS = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}


def tensor(values, name="f32", shape=None):
    array = np.ascontiguousarray(values, ARRAYS[name])
    return TensorView.of_raw(NUMBERS[name], tuple(array.shape if shape is None else shape), array.tobytes())


def request(number, x, ids, weights, *, layer=0, hidden="f32", routes="i32", weight="f32", **more):
    return ForwardRequestView(number, layer, tensor(x, hidden), tensor(ids, routes), tensor(weights, weight), **more)
