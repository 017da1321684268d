"""`expertctl forward`: sends one batch and shows the answer."""

from __future__ import annotations

import argparse
import json
import time
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.table import Table

from expertctl.commands.options import (
    OUTPUT_DTYPES,
    add_common,
    add_routing,
    checked_wire_dtype,
    credentials,
    new_file,
    popularity,
)
from expertctl.common.counts import at_least
from expertctl.common.files import load_array, load_tensors, save_array
from expertctl.common.workload import drawn, layer_shapes, synthetic
from expertd.dtypes import dtype_name
from expertd.tables import console, duration
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.requests.e4m3 import E4m3
from expertd_client.requests.request import Request, RequestOptions
from expertd_client.requests.result import ForwardResult
from expertd_client.tracing.stages import SERVER

__all__ = ["add_parser", "run"]

_NAMES = ("hidden_states", "topk_ids", "topk_weights")


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "forward",
        help=text,
        description="Sends one batch and shows the answer.  The batch is drawn here from --seed, or by the server"
        " (--synthetic), or read from files.",
    )
    add_common(parser)
    add_routing(parser)
    parser.add_argument("--layer", type=at_least(0), metavar="N", help="default: the first that the server holds")
    source = parser.add_argument_group("the batch")
    source.add_argument(
        "--synthetic", action="store_true", help="the server draws it: about 60 bytes a tensor are sent"
    )
    source.add_argument("--tensors", type=Path, metavar="FILE", help=".safetensors with " + ", ".join(_NAMES))
    for name in _NAMES:
        source.add_argument(
            "--" + name.replace("_", "-"), type=Path, metavar="FILE", help=".npy, in place of that tensor"
        )
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--output-dtype", choices=OUTPUT_DTYPES, help="default: that of hidden_states")
    answer.add_argument("--digest", action="store_true", help="ask for sum, sum of squares and CRC-32 alone")
    answer.add_argument("--save", type=new_file, metavar="FILE", help="write the output as .npy (bf16 and e4m3 as f32)")
    answer.add_argument(
        "--router-weight-on-input", action="store_true", help="weights multiply the experts' inputs (top-k 1)"
    )


def run(args: argparse.Namespace) -> int:
    if args.save and args.digest:
        raise ValueError("--save: got --digest with it, want one of them: a digest has no output to write")
    with ExpertClient(
        args.address,
        unary=args.unary,
        timeout_s=args.timeout,
        credentials=credentials(args),
        wire_dtype=args.wire_dtype,
    ) as client:
        request = _request(args, client)
        begin_s = time.perf_counter()
        answer = client.forward_request(request)
        round_trip_s = time.perf_counter() - begin_s
    if args.save:
        save_array(args.save, answer.output.widened() if isinstance(answer.output, E4m3) else answer.output)
    report = _report(request, answer, round_trip_s)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def _request(args: argparse.Namespace, client: ExpertClient) -> Request:
    described = client.describe(timeout_s=args.timeout)
    checked_wire_dtype(args, described)
    shape = layer_shapes(described, None if args.layer is None else [args.layer], args.top_k)[0]
    options: RequestOptions = {
        "output_dtype": args.output_dtype,
        "digest": args.digest,
        "router_weight_on_input": args.router_weight_on_input,
    }
    files = {name: getattr(args, name) for name in _NAMES if getattr(args, name)}
    wanted = popularity(args)
    if args.synthetic:
        if files or args.tensors:
            raise ValueError("--synthetic: got files with it, want one of them: the server draws all three tensors")
        return synthetic(args.seed, args.m, shape, args.routing.zipf, **options)
    read: dict[str, Any] = load_tensors(args.tensors, _NAMES) if args.tensors else {}
    read.update({name: load_array(path) for name, path in files.items()})
    tokens = next((len(array) for array in read.values() if array.ndim), args.m)
    values = drawn(np.random.default_rng(args.seed), tokens, shape, wanted)
    return Request(shape.layer, *(read.get(name, getattr(values, name)) for name in _NAMES), **options)


def _report(request: Request, answer: ForwardResult, round_trip_s: float) -> dict[str, Any]:
    t = answer.timing
    report: dict[str, Any] = {
        "layer": request.layer,
        "tokens": request.tokens,
        "routes_computed": answer.routes_computed,
        "output": _output(answer, dtype_name(request.dtypes[0])),
        "round_trip_us": round(round_trip_s * 1e6, 1),
        "timing": {f.name: getattr(t, f.name) for f in pb.Timing.DESCRIPTOR.fields},
        "load": {f.name: getattr(answer.load, f.name) for f in pb.Load.DESCRIPTOR.fields},
    }
    return report


def _output(answer: ForwardResult, dtype: str) -> dict[str, Any]:
    """The digest as the server makes it, whoever made it, and the range where the output itself came.  Of e4m3 the sums
    and the range are of code * scale, and the CRC-32 is that of the codes."""
    if answer.output is None:
        d = answer.digest or pb.Digest()
        return {"sum": d.sum, "sum_of_squares": d.sum_of_squares, "crc32": f"{d.crc32:08x}"}
    out, raw = answer.output, answer.output
    if isinstance(out, E4m3):
        out, raw = out.widened(), out.codes
    wide = out.astype(np.float64) if out.dtype != ml_dtypes.bfloat16 else out.astype(np.float32).astype(np.float64)
    return {
        "dtype": dtype,
        "shape": list(out.shape),
        "sum": float(wide.sum()),
        "sum_of_squares": float((wide * wide).sum()),
        "crc32": f"{zlib.crc32(raw.tobytes()):08x}",
        "min": float(wide.min()) if wide.size else 0.0,
        "max": float(wide.max()) if wide.size else 0.0,
    }


def _show(report: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    out, t = report["output"], report["timing"]
    rows = {
        "layer": f"{report['layer']}, {report['tokens']} tokens, {report['routes_computed']} routes computed",
        "output": f"{out['dtype']} {out['shape']}, {out['min']:.4g} to {out['max']:.4g}"
        if "dtype" in out
        else "digest",
        "digest": f"sum {out['sum']:.6g}, sum of squares {out['sum_of_squares']:.6g}, crc32 {out['crc32']}",
        "round trip": duration(report["round_trip_us"] * 1e-6),
        "server": ", ".join(f"{k[:-3]} {duration(v * 1e-9)}" for k, v in t.items() if k in SERVER.values()),
        "batch": f"{t['batch_tokens']} tokens of {t['batch_requests']} requests, backend {t['backend']}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console().print(table, markup=False)
