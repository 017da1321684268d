"""What the core's table says to a device of inline requests, read here as the device would read it: csrc/batch.cpp
compiled by itself, because a core for a device needs one."""

import ctypes as C
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from expertd.cxx import E4M3, SHM, BuildError, find_compiler
from expertd_kernels.backends.gather import table
from expertd_server.engine.core import Config, Forward

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "server/expertd_server/engine/csrc"
SHIM = """
#include <cstring>

#include "batch.h"
#include "server_side.h"
using namespace expertd;
extern "C" int test_table(BatchSlotMemory* memory, const Config* config, uint32_t hidden_size, uint32_t count,
                          Forward* f, uint32_t* bad) {
  Layer layer;
  layer.facts.hidden_size = hidden_size;
  layer.facts.num_experts = 8;
  std::vector<Item> items(count);
  BatchSlot batch_slot;
  batch_slot.memory = *memory;
  batch_slot.layer = &layer;
  for (uint32_t i = 0; i < count; ++i) {
    items[i].f = f[i];
    if (f[i].on_device && bad) {  // of a session: it is only asked whether there is one
      items[i].connection = reinterpret_cast<ShmConnection*>(8);
      items[i].f.on_device = 0;
    }
    batch_slot.items.push_back(&items[i]);
    batch_slot.tokens += f[i].tokens;
  }
  write_table(batch_slot, *config);
  for (uint32_t i = 0; bad && i < count; ++i) {
    const Bad& b = batch_slot.bad[i];
    const uint32_t found[] = {b.any, b.hidden, b.row, b.column};
    memcpy(bad + 4 * i, found, sizeof found);
  }
  return movable(batch_slot, *config);
}
"""


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Compiled once, 4 s."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "shim.cpp").write_text(SHIM)
    try:
        compiler = find_compiler()
    except BuildError as e:
        pytest.skip(str(e))
    places = [f"-I{p}" for p in (CSRC, ROOT / SHM, ROOT / E4M3)]
    sources = [str(p) for p in (folder / "shim.cpp", CSRC / "batch.cpp", CSRC / "gather.cpp")]
    command = [*compiler, "-std=c++17", "-O1", "-fPIC", "-shared", *places, *sources, "-o", str(folder / "table.so")]
    subprocess.run(command, check=True, timeout=120)
    return C.CDLL(str(folder / "table.so")).test_table


def row(address, dtype, count):
    return np.frombuffer((C.c_char * (count * np.dtype(dtype).itemsize)).from_address(address), dtype)


@pytest.mark.parametrize("policy", [1, 2])
@pytest.mark.parametrize("e4m3", [False, True])
def test_where_numbers_are_looked_at_everything_is_staged(write, policy, e4m3):
    """Also of a session in shared memory: the device reads what was looked at, not what its caller may still change."""
    from expertd_server.engine.core import BatchSlotMemory

    M, k, H = 3, 2, 256
    g = np.random.default_rng(1)
    hidden, out = np.full(8 * H, 0xEEEE, np.uint16), np.zeros(8 * H, np.uint16)
    lines, ids, weights = np.zeros((8, 8), np.uint64), np.zeros((8, k), np.int32), np.zeros((8, k), np.float32)
    memory = BatchSlotMemory(
        table=lines.ctypes.data, hidden=hidden.ctypes.data, slots=ids.ctypes.data, weights=weights.ctypes.data,
        out=out.ctypes.data,
    )  # fmt: skip
    plain = g.standard_normal((M, H)).astype(np.float32)
    codes, scales = g.integers(0, 0x7F, (M, H)).astype(np.uint8), np.ones((M, H // 128), np.float32)
    plain[1, 9], codes[1, 9] = np.inf, 0x7F
    mine, mine_w = np.tile(np.arange(k, dtype=np.int32), (M, 1)), np.full((M, k), 0.5, np.float32)
    mine_w[0, 1] = np.nan
    arena = np.zeros((M, H), np.uint16)
    common = {"ids": mine.ctypes.data, "weights": mine_w.ctypes.data, "tokens": M, "top_k": k, "ids_dtype": table.I32}
    common |= {"weights_dtype": table.F32, "out_dtype": table.BF16, "out": arena.ctypes.data}
    if e4m3:
        common |= {"hidden": codes.ctypes.data, "scales": scales.ctypes.data, "hidden_dtype": table.E4M3}
    else:
        common |= {"hidden": plain.ctypes.data, "hidden_dtype": table.F32}
    both = (Forward * 2)(Forward(**common, on_device=1), Forward(**common))  # on_device: of a session, for the shim
    config = Config(max_tokens=8, compute_dtype=table.BF16, device=1, nonfinite=policy)
    bad = (C.c_uint32 * 8)()
    write(C.byref(memory), C.byref(config), H, 2, both, bad)
    wide = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() if e4m3 else torch.from_numpy(plain)
    want = (torch.where(wide.isfinite(), wide, 0.0) if policy == 2 else wide * 0).bfloat16()
    if policy == 1:
        want.zero_()
    want = want.view(torch.int16).numpy().view(np.uint16)
    for i in range(2 * M):
        np.testing.assert_array_equal(row(int(lines[i, 0]), np.uint16, H), want[i % M])
        assert (lines[i, 4] & 15, lines[i, 5]) == (table.BF16, 0)
    places = [(int(lines[i, 3]) - a.ctypes.data) // (2 * H) for i, a in enumerate([arena] * M + [out] * M)]
    assert places == [0, 1, 2, 0, 1, 2], "a session's output goes where it wants it, others' into the batch_slot"
    got = [row(int(lines[i, 2]), np.float32, k).tolist() for i in range(2 * M)]
    assert got[1] == got[4] == [0.5, 0.5]
    assert got[0][1] == 0 if policy == 2 else np.isnan(got[0][1]), "the device refuses it"
    assert list(bad) == ([1, 1, 1, 9] * 2 if policy == 1 else [0] * 8)


@pytest.mark.parametrize(("H", "kept"), [(256, True), (272, True), (200, False), (16, True)])
def test_e4m3_that_came_inline_is_left_to_the_device_where_it_fits(write, H, kept):
    from expertd_server.engine.core import BatchSlotMemory

    M, k, blocks = 3, 2, -(-H // 128)
    g = np.random.default_rng(H)
    hidden, out = np.full(8 * 2 * H * 2, 0xEE, np.uint8), np.zeros(8 * H, np.uint16)
    lines, ids, weights = np.zeros((8, 8), np.uint64), np.zeros((8, k), np.int32), np.zeros((8, k), np.float32)
    memory = BatchSlotMemory(
        table=lines.ctypes.data, hidden=hidden.ctypes.data, slots=ids.ctypes.data, weights=weights.ctypes.data,
        out=out.ctypes.data,
    )  # fmt: skip
    plain = g.standard_normal((M, H)).astype(np.float32)
    codes = g.integers(0, 0x7F, (M, H)).astype(np.uint8)
    scales = g.uniform(0.5, 2, (M, blocks)).astype(np.float32)
    mine, mine_w = np.tile(np.arange(k, dtype=np.int32), (M, 1)), np.ones((M, k), np.float32)
    common = {"ids": mine.ctypes.data, "weights": mine_w.ctypes.data, "tokens": M, "top_k": k, "ids_dtype": table.I32}
    common |= {"weights_dtype": table.F32, "out_dtype": table.BF16}
    both = (Forward * 2)(
        Forward(hidden=plain.ctypes.data, hidden_dtype=table.F32, **common),
        Forward(hidden=codes.ctypes.data, scales=scales.ctypes.data, hidden_dtype=table.E4M3, **common),
    )
    config = Config(max_tokens=8, compute_dtype=table.BF16, device=1, streamed_rows=1)
    movable = write(C.byref(memory), C.byref(config), H, 2, both, None)
    assert not movable, "copy engines move rows of the compute dtype alone"
    bits = torch.from_numpy(plain).bfloat16().view(torch.int16).numpy().view(np.uint16)
    wide = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(
        scales.repeat(128, axis=1)[:, :H]
    )
    for i in range(M):
        np.testing.assert_array_equal(row(int(lines[i, 0]), np.uint16, H), bits[i])
        assert lines[i, 4] & 15 == table.BF16
        line = lines[M + i]
        assert line[4] & 15 == (table.E4M3 if kept else table.BF16)
        assert line[0] % 16 == 0 or not kept
        if kept:
            assert line[5] % 4 == 0
            np.testing.assert_array_equal(row(int(line[0]), np.uint8, H), codes[i])
            np.testing.assert_array_equal(row(int(line[5]), np.float32, blocks), scales[i])
        else:
            want = wide[i].bfloat16().view(torch.int16).numpy().view(np.uint16)
            np.testing.assert_array_equal(row(int(line[0]), np.uint16, H), want)
    rows = [int(a) for a in lines[: 2 * M, 0]]
    assert max(rows) < hidden.ctypes.data + 2 * M * H * 2
    assert (hidden[2 * M * H * 2 :] == 0xEE).all(), "nothing is written behind the rows"
