"""A layer with a part on a device whose driver is pretended: a graph is a function that is called.  Run by
test_joined.py with that driver before all others; prints what came out as JSON."""

import ctypes as C
import json

import numpy as np
import torch

from expertd_server.engine import joined as module
from expertd_server.engine.core import library

H, K, HELD, ROWS = 64, 2, 5, 128
ON_DEVICE, ON_HOST = (0, 2, 4), (1, 3)


class Call(C.Structure):
    """csrc/core.h: Call."""

    _fields_ = [
        *((n, C.c_void_p) for n in ("x", "slots", "weights", "out")),
        *((n, C.c_int64) for n in ("m", "x_stride")),
        *((n, C.c_int32) for n in ("top_k", "x_f32", "out_f32", "weight_on_input")),
    ]


def view(address, shape, kind):
    return np.frombuffer((kind * int(np.prod(shape))).from_address(address), np.dtype(kind)).reshape(shape)


def answer(x, slots, w, factor):
    """[M, H]: each route adds (slot + 1) * factor * w * x."""
    return x * np.where(slots >= 0, (slots + 1) * factor * w, 0).sum(1, keepdims=True)


HOST = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_void_p, C.POINTER(Call))
seen = {"host": [], "device": []}


@HOST
def on_host(context, experts, call):
    c = call.contents
    x, slots = view(c.x, (c.m, H), C.c_float), view(c.slots, (c.m, c.top_k), C.c_int32)
    w, out = view(c.weights, (c.m, c.top_k), C.c_float), view(c.out, (c.m, H), C.c_float)
    seen["host"].append(int(c.m))
    out[:] = answer(x, slots, w, 10)
    return seen.pop("host_error", 0)


def main():
    lib = module._library()
    assert lib is library()
    space = lib.expertd_joined_space(2)
    joined = lib.expertd_joined(space, H, HELD, 1)
    slots = [module._slots(held, HELD) for held in (ON_DEVICE, ON_HOST)]
    table, done = np.zeros((ROWS, 8), np.int64), np.zeros(16, np.uint32)
    hidden, out = np.zeros((ROWS, H), np.float32), np.zeros((ROWS, H), np.float32)
    ids, weights = np.zeros(ROWS * K, np.int32), np.zeros(ROWS * K, np.float32)
    device = module.JoinedPart(
        slots=slots[0].ctypes.data, table=table.ctypes.data, done=done.ctypes.data, hidden=hidden.ctypes.data,
        ids=ids.ctypes.data, weights=weights.ctypes.data, out=out.ctypes.data, device_slots=slots[0].ctypes.data,
        stream=7, rows=ROWS, routes=ROWS * K,
    )  # fmt: skip
    lib.expertd_joined_part(joined, 0, C.byref(device))
    host = module.JoinedPart(call=C.cast(on_host, C.c_void_p).value, context=1, experts=1, slots=slots[1].ctypes.data)
    lib.expertd_joined_part(joined, 1, C.byref(host))

    keep = []

    def graph(size):
        """What collect, the experts, deliver and the word do; padding is left alone."""

        def run():
            rows = [line for line in table[:size] if line[4]]
            seen["device"].append(len(rows))
            for line in rows:
                info = int(line[4])
                assert (info & 15, info >> 16 & 0xFFFF, info >> 32) == (1, K, HELD), info
                x, own = view(int(line[0]), (1, H), C.c_float), view(int(line[1]), (1, K), C.c_int32)
                w, to = view(int(line[2]), (1, K), C.c_float), view(int(line[3]), (1, H), C.c_float)
                to[:] = answer(x, view(int(line[6]), (HELD + 1,), C.c_int32)[own], w, 1)
            if not seen.get("hangs"):
                done[0] = 1

        keep.append(C.CFUNCTYPE(None)(run))
        return C.cast(keep[-1], C.c_void_p)

    def call(M, seed, only=None):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(M, H, generator=g).numpy()
        ids = torch.randint(-1, HELD, (M, K), generator=g, dtype=torch.int32).numpy()
        if only is not None:
            ids[:] = only
        w, y = torch.rand(M, K, generator=g).numpy(), np.full((M, H), np.nan, np.float32)
        c = Call(x.ctypes.data, ids.ctypes.data, w.ctypes.data, y.ctypes.data, M, H, K, 1, 1, 0)
        code = lib.expertd_joined_call(joined, None, C.byref(c))
        want = answer(x, slots[0][ids], w, 1) + answer(x, slots[1][ids], w, 10)
        return code, bool(np.isnan(y).all()), float(np.abs(y - want).max()) if code == 0 else None

    found = {"no graph": call(5, 0)}
    for rows in (1, 8, 96):
        lib.expertd_joined_graph(joined, 0, rows, K, 0, graph(rows))
    for M in (1, 5, 8, 70):
        found[str(M)] = call(M, M)
    found["without its graph"] = call(3, 3)
    seen["host"].clear(), seen["device"].clear()
    found["device alone"] = call(5, 5, 2)
    found["host alone"] = call(5, 5, 3)
    found["nobody"] = call(5, 5, -1)
    found["seen"] = {"host": list(seen["host"]), "device": list(seen["device"])}
    seen["host_error"] = 1
    found["host fails"] = call(5, 6)
    seen["hangs"] = True
    found["device ends without its word"] = call(5, 7)
    times = (C.c_uint64 * 6)()
    lib.expertd_joined_times(space, times)
    found["calls"] = [times[0], times[3]]
    lib.expertd_joined_free(joined)
    lib.expertd_joined_space_free(space)
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
