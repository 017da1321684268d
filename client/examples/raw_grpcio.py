"""Without this client: grpcio and the generated stubs, as from any other language.

    python client/examples/raw_grpcio.py 127.0.0.1:50051

Sends the same request as raw bytes and as typed values, each alone and both over one stream, and compares the answers.

gRPC's limit of 4 MiB for an answer holds here; the channel's option grpc.max_receive_message_length lifts it.
"""

import struct
import sys

import grpc

from expertd.v1 import expert_service_pb2 as pb
from expertd.v1 import expert_service_pb2_grpc as pb_grpc

TOKENS = 2


def main(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        server = pb_grpc.ExpertServiceStub(channel)
        described = server.Describe(pb.DescribeRequest(), timeout=30)
        layer, hidden = described.layers[0], described.model.hidden_size

        values = [((n * 37) % 101 - 50) / 25 for n in range(TOKENS * hidden)]
        ids = [(n * 3) % layer.num_experts for n in range(TOKENS * layer.top_k)]
        routes = {
            "topk_ids": pb.Tensor(
                dtype=pb.DATA_TYPE_I32, shape=[TOKENS, layer.top_k], raw=struct.pack(f"<{len(ids)}i", *ids)
            ),
            "topk_weights": pb.Tensor(
                dtype=pb.DATA_TYPE_F32, shape=[TOKENS, layer.top_k], floats=pb.FloatValues(values=[0.5] * len(ids))
            ),
        }
        shape = [TOKENS, hidden]
        as_bytes = pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=shape, raw=struct.pack(f"<{len(values)}f", *values))
        as_values = pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=shape, floats=pb.FloatValues(values=values))
        requests = [
            pb.ForwardRequest(request_id=n, layer=layer.layer, hidden_states=x, output_dtype=pb.DATA_TYPE_F32, **routes)
            for n, x in enumerate((as_bytes, as_values), 1)
        ]

        # Forward: one call for each, with gRPC's own deadline.
        answers = [server.Forward(request, timeout=30) for request in requests]

        # StreamForward: both in flight on one stream, answered in any order, matched by request_id.
        stream = server.StreamForward(
            iter([pb.StreamForwardRequest(forward=request) for request in requests]), timeout=30
        )
        streamed = list(stream)

    for message in streamed:
        if message.WhichOneof("kind") == "error":
            print(f"request {message.error.request_id} failed: {message.error.reason}: {message.error.message}")
            return 1
    answers += [m.forward for m in streamed if m.WhichOneof("kind") == "forward"]
    outputs = [struct.unpack(f"<{TOKENS * hidden}f", answer.output.raw) for answer in answers]
    largest = max(abs(v) for v in outputs[0])
    # Requests that wait together are computed as one batch, and sums over batches of other sizes round differently.
    apart = max(abs(v - w) for output in outputs for v, w in zip(output, outputs[0], strict=True))
    print(f"{len(answers)} answers, at most {apart / largest:.1e} of the largest value apart")
    print(f"routes computed: {[answer.routes_computed for answer in answers]}")
    complete = all(answer.routes_computed == TOKENS * layer.top_k for answer in answers)
    return 0 if len(answers) == 4 and apart <= 1e-2 * largest and complete else 1


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python raw_grpcio.py ADDRESS")
    sys.exit(main(sys.argv[1]))
