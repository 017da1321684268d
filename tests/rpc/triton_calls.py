"""Calls by NVIDIA's tritonclient, in a process of its own (its generated messages and ours cannot both be in one):

python triton_calls.py ADDRESS FOLDER      prints JSON: what each call of a checkpoint's expected.safetensors gave
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from queue import Queue

import numpy as np
import tritonclient.grpc as triton
from safetensors.numpy import load_file
from tritonclient.utils import InferenceServerException

MODEL = "layer_0"


def infer(client, x, ids, weights, model=MODEL, **more):
    inputs = []
    for name, value, datatype in (("hidden_states", x, None), ("topk_ids", ids, None), ("topk_weights", weights, None)):
        kind = datatype or {"float32": "FP32", "float16": "FP16", "int32": "INT32", "int64": "INT64"}[value.dtype.name]
        inputs.append(triton.InferInput(name, list(value.shape), kind))
        inputs[-1].set_data_from_numpy(value)
    return client.infer(model, inputs, **more)


def refused(work):
    try:
        work()
    except InferenceServerException as error:
        return [error.status(), error.message()]
    raise AssertionError("it was not refused")


def async_answers(client, inputs, count: int) -> int:
    """How many of that many calls at once are answered; none is open when it returns."""
    done: Queue[InferenceServerException | None] = Queue()
    for _ in range(count):
        client.async_infer(MODEL, inputs, callback=lambda result, error: done.put(error))
    errors = [done.get(timeout=20) for _ in range(count)]
    return errors.count(None)


def main(address: str, folder: Path) -> None:
    said: dict[str, object] = {}
    tensors = load_file(folder / "expected.safetensors")
    with triton.InferenceServerClient(address) as client:
        said["live"], said["ready"] = client.is_server_live(), client.is_server_ready()
        said["model_ready"] = [client.is_model_ready(name) for name in (MODEL, "layer_7", "resnet")]
        said["server"] = client.get_server_metadata(as_json=True)
        said["model"] = client.get_model_metadata(MODEL, as_json=True)
        said["config"] = client.get_model_config(MODEL, as_json=True)
        said["errors"] = errors = {}
        for case in ("M1", "M5", "M33"):
            x, ids, weights, want = (
                tensors[f"{case}.{n}"] for n in ("hidden_states", "topk_ids", "topk_weights", "expected")
            )
            for dtype in (np.float32, np.float16):
                answer = infer(client, x.astype(dtype), ids, weights, request_id=case)
                got = answer.as_numpy("output")
                assert (got.dtype, got.shape, answer.get_response().id) == (dtype, want.shape, case)
                parameters = answer.get_response().parameters
                assert parameters["routes_computed"].int64_param == ids.size
                off = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
                errors[f"{case} {np.dtype(dtype).name}"] = float(off)
            small = infer(client, x, ids.astype(np.int32), weights, outputs=[triton.InferRequestedOutput("output")])
            np.testing.assert_array_equal(small.as_numpy("output"), infer(client, x, ids, weights).as_numpy("output"))
        said["async"] = async_answers(client, _inputs(x, ids, weights), 20)
        said["refused"] = {
            "layer": refused(lambda: infer(client, x, ids, weights, model="layer_9")),
            "name": refused(lambda: infer(client, x, ids, weights, model="resnet")),
            "version": refused(lambda: infer(client, x, ids, weights, model_version="2")),
            "shape": refused(lambda: infer(client, x[:, :8].copy(), ids, weights)),
            "expert": refused(lambda: infer(client, x, ids + 1000, weights)),
            "dtype": refused(lambda: infer(client, x, ids, ids)),
            "timeout": refused(lambda: infer(client, x, ids, weights, timeout=1)),
            "shared": refused(client.get_system_shared_memory_status),
            "cuda": refused(lambda: client.unregister_cuda_shared_memory("x")),
            "statistics": refused(client.get_inference_statistics),
        }
    print(json.dumps(said))


def _inputs(x, ids, weights):
    made = []
    for name, value, kind in (
        ("hidden_states", x, "FP32"),
        ("topk_ids", ids, "INT64"),
        ("topk_weights", weights, "FP32"),
    ):
        made.append(triton.InferInput(name, list(value.shape), kind))
        made[-1].set_data_from_numpy(value)
    return made


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
