"""A bare grpc.aio server that says no to every message at once: what a refusal takes that nothing comes before.

    python -m expertctl.bench.overload.bare refuse [--listen HOST:PORT]

`expertctl bench overload --bare` measures it beside each load: sooner nobody can refuse on that machine over gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import grpc

from expertd.codec import encode_stream_response, peek_request_id
from expertd.errors import OverloadedError
from expertd_client.transports.grpc import common

__all__ = ["main"]

_NO = OverloadedError.about("request", got="anything", want="another server", retry_after_us=1000)


async def _refuse(_: Any, context: Any) -> None:
    read, write, eof = context.read, context.write, grpc.aio.EOF
    while (data := await read()) is not eof:
        await write(encode_stream_response(_NO.to_request_error(peek_request_id(data, stream=True))))


async def _serve(listen: str) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    service, _, method = common.STREAM_FORWARD.strip("/").partition("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(_refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    host, _, _ = listen.rpartition(":")
    port = server.add_insecure_port(listen)
    await server.start()
    print(f"serving on {host}:{port}", flush=True)
    await server.wait_for_termination()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("command", choices=("refuse",))
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    asyncio.run(_serve(parser.parse_args().listen))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
