"""Cases of collect and deliver, with tables of addresses: in Triton's interpreter, and on a GPU with pinned memory."""

import torch
import triton
from interpreted import answer_cases

from expertd_kernels.backends.gather import table as t
from expertd_kernels.backends.gather.kernels import collect, collect_e4m3, deliver, signal
from expertd_kernels.backends.gluon.w8a8.prepare import round_to_places

FLOATS = {t.F32: torch.float32, t.F16: torch.float16, t.BF16: torch.bfloat16}
INTS = {t.I32: torch.int32, t.I64: torch.int64}
E, HELD = 10, 6


GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret


def host(t):
    """Memory that the device reads and writes by its address."""
    return t.pin_memory() if GPU else t


def device(t):
    return t.cuda() if GPU else t


def host_at(t, n):
    """The same, t from its n-th element on, so mostly at no multiple of 16 bytes."""
    around = host(torch.zeros(len(t) + n, dtype=t.dtype))
    around[n:] = t
    return around[n:]


def settled():
    if GPU:
        torch.cuda.synchronize()


def same(got, want):
    """Bit for bit; Triton's interpreter cuts f32 to bf16 where devices round, which is at most the last bit."""
    if got.dtype is torch.bfloat16 and triton.knobs.runtime.interpret:
        return bool(((got.view(torch.int16) - want.view(torch.int16)).abs() <= 1).all())
    return torch.equal(got, want)


def held():
    """Experts 2..7 are here."""
    slots = torch.full((E + 1,), -1, dtype=torch.int32)
    slots[2 : 2 + HELD] = torch.arange(HELD, dtype=torch.int32)
    return device(slots)


def buffers(rows, H, K, dtype=torch.bfloat16):
    return (
        device(torch.full((rows, H), float("nan"), dtype=dtype)),
        device(torch.full((rows, K), 99, dtype=torch.int32)),
        device(torch.full((rows, K), float("nan"))),
        host(torch.full((rows, 2), 77, dtype=torch.int32)),
    )


def on_the_host(*tensors):
    settled()
    return [t.cpu() for t in tensors]


def line(x, ids, w, out, k, kinds, places, counts=None, scales=0):
    counted = 0 if counts is None else counts.data_ptr()
    tensors = [x.data_ptr(), ids.data_ptr(), w.data_ptr(), out.data_ptr()]
    return [*tensors, t.info(k, E, *kinds), scales, places.data_ptr(), counted]


def rows_of_every_type(compute):
    """Each row another combination of types and top_k, one row padding; widths that are no powers of two."""
    g = torch.Generator().manual_seed(1)
    H, K = 200, 3
    lines, keep = [], []
    places, counts = held(), device(torch.zeros(HELD, dtype=torch.int64))
    for kinds in [(a, i, w, o) for a in FLOATS for i in INTS for w in FLOATS for o in FLOATS]:
        k = 1 + len(lines) % K
        x = host_at(torch.randn(H, generator=g).to(FLOATS[kinds[0]]), len(lines) % 4)
        ids = host(torch.randint(-1, E, (k,), generator=g).to(INTS[kinds[1]]))
        w = host(torch.rand(k, generator=g).to(FLOATS[kinds[2]]))
        out = host(torch.full((H,), float("nan"), dtype=FLOATS[kinds[3]]))
        lines.append(line(x, ids, w, out, k, kinds, places, counts))
        keep.append((x, ids, w, out))
    lines.insert(5, [0] * 8)
    keep.insert(5, None)
    table = host(torch.tensor(lines, dtype=torch.int64))
    hidden, slots, weights, verdicts = buffers(len(lines), H, K, compute)
    collect(table, len(lines), hidden, slots, weights, verdicts)
    result = torch.randn(len(lines), H, generator=g).to(compute)
    deliver(table, len(lines), device(result))
    hidden, slots, weights, counts, places = on_the_host(hidden, slots, weights, counts, places)
    seen = torch.zeros(HELD, dtype=torch.int64)
    for i, kept in enumerate(keep):
        if kept is None:
            assert (slots[i] == -1).all()
            assert (weights[i] == 0).all()
            assert verdicts[i].tolist() == [0, 0]
            assert (hidden[i] == 0).all()
            continue
        x, ids, w, out = kept
        k = len(ids)
        assert same(hidden[i], x.to(compute))
        expected = [int(places[int(e)]) for e in ids]
        assert slots[i, :k].tolist() == expected
        assert (slots[i, k:] == -1).all()
        assert torch.equal(weights[i, :k], w.float())
        assert (weights[i, k:] == 0).all()
        here = [s for s in expected if s >= 0]
        assert verdicts[i].tolist() == [len(here), 0]
        for s in here:
            seen[s] += 1
        assert same(out, result[i].to(out.dtype))
    assert torch.equal(counts, seen)


def e4m3_with_scales(apart):
    """Every code, NaN and subnormals among them, as torch widens it; the last block is not whole."""
    H = 300
    codes = host_at(torch.arange(H, dtype=torch.int32).to(torch.uint8), apart)
    scales = host(torch.tensor([0.5, 3.0, -1.25]))
    ids, w = host(torch.tensor([2], dtype=torch.int32)), host(torch.ones(1))
    out = host(torch.empty(H, dtype=torch.bfloat16))
    kinds, places = (t.E4M3, t.I32, t.F32, t.BF16), held()
    table = host(
        torch.tensor([line(codes, ids, w, out, 1, kinds, places, scales=scales.data_ptr())], dtype=torch.int64)
    )
    hidden, slots, weights, verdicts = buffers(1, H, 1, torch.float32)
    collect(table, 1, hidden, slots, weights, verdicts)
    (hidden,) = on_the_host(hidden)
    want = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128)[:H]
    assert torch.equal(hidden[0].isnan(), want.isnan())
    assert torch.equal(hidden[0].nan_to_num(), want.nan_to_num())


def rounded_here(x):
    """x [H], rounded to bf16 as the table's rows are, by gluon_w8a8's own kernel for inputs: codes u8 [H], scales."""
    H = x.shape[0]
    x = device(x.bfloat16().view(1, H))
    places = device(torch.zeros(1, 1, dtype=torch.int32))
    codes = device(torch.zeros(1, H, dtype=torch.float8_e4m3fn))
    scales = device(torch.full((1, H // 128), float("nan")))
    width = triton.next_power_of_2(H)
    round_to_places[(1,)](x, places, codes, scales, 1, 1, H, True, False, 1, width, False)
    codes, scales = on_the_host(codes, scales)
    return codes[0].view(torch.uint8), scales[0]


def rows_as_codes(staged):
    """e4m3 rows are as they came, with scales of any kind; others have the codes that gluon_w8a8 would make of them.
    staged: hidden states that lie on the device already."""
    g = torch.Generator().manual_seed(5)
    H, K = 384, 2
    places = held()
    lines, keep = [], []
    kinds = [t.BF16, t.E4M3, t.BF16] if staged else [t.BF16, t.E4M3, t.F32, t.F16, t.E4M3] * 2
    for n, kind in enumerate(kinds):
        scales = host(torch.tensor([0.25, float("nan"), -3.0]) if n == 1 else torch.rand(H // 128, generator=g))
        if kind == t.E4M3:
            x = host_at(torch.randint(0, 256, (H,), generator=g, dtype=torch.int32).to(torch.uint8), n // 5)
        else:
            x = torch.randn(H, generator=g) * 10.0 ** (n % 5)
            x[128:256] = 0
            x = x if GPU else x.bfloat16()  # the interpreter cuts f32 where devices round
            x = host_at(x.to(FLOATS[kind]), n // 5)
        ids, w = host(torch.tensor([2, 3], dtype=torch.int32)), host(torch.tensor([0.25, 0.5]))
        out = host(torch.empty(H, dtype=torch.bfloat16))
        keep.append((x, ids, w, out, scales, kind))
        lines.append(line(x, ids, w, out, K, (kind,), places, scales=scales.data_ptr()))
    lines.append([0] * 8)
    rows = len(lines)
    table = host(torch.tensor(lines, dtype=torch.int64))
    _, slots, weights, verdicts = buffers(rows, H, K)
    codes = device(torch.full((rows, H), 0x7F, dtype=torch.uint8)).view(torch.float8_e4m3fn)
    scales = device(torch.full((rows, H // 128), float("nan")))
    brought = None
    if staged:  # the table's addresses of hidden states are not for the device
        table[:, 0], table[:, 5] = 8, 8
        nothing = torch.full((H,), float("nan"), dtype=torch.bfloat16)
        brought = device(torch.stack([*(nothing if kept[5] == t.E4M3 else kept[0] for kept in keep), nothing]))
        codes.view(torch.uint8)[1] = device(keep[1][0])
        scales[1] = device(keep[1][4])
    collect_e4m3(table, rows, codes, scales, slots, weights, verdicts, brought)
    got, got_scales, slots, weights = on_the_host(codes.view(torch.uint8), scales, slots, weights)
    for i, (x, _, w, _, own, kind) in enumerate(keep):
        want, want_scales = (x, own) if kind == t.E4M3 else rounded_here(x)
        assert torch.equal(got[i], want), i
        assert torch.equal(got_scales[i].nan_to_num(7.0), want_scales.nan_to_num(7.0)), i
        assert slots[i].tolist() == [0, 1]
        assert torch.equal(weights[i], w)
    assert not bool(got[-1].any()), "padding is zero"
    assert bool(got_scales[-1].isfinite().all())
    assert slots[-1].tolist() == [-1, -1]
    assert verdicts[:, 0].tolist() == [2] * len(keep) + [0]


def wrong_ids_and_weights():
    """The verdict names the first column that is wrong; such a row has no routes, its neighbours keep theirs."""
    H, K = 16, 4
    good, w = [2, 3, -1, 9], [0.25, 0.5, 0.125, 1.0]
    rows = [
        (good, w, 0),
        ([2, 10, 3, 4], w, 2),
        ([2, 3, -2, 4], w, 3),
        ([2, 3, 4, 2**31 - 1], w, 4),
        (good, [0.25, float("nan"), 0.5, 1.0], 2 - 2**31),
        (good, [0.25, 0.5, float("-inf"), float("inf")], 3 - 2**31),
        ([2, 3, 99, 4], [float("nan"), 1.0, 1.0, 1.0], 3),
    ]
    lines, keep = [], []
    places, counts = held(), device(torch.zeros(HELD, dtype=torch.int64))
    for ids, weights, _ in rows:
        kept = (
            host(torch.ones(H, dtype=torch.bfloat16)),
            host(torch.tensor(ids, dtype=torch.int32)),
            host(torch.tensor(weights)),
            host(torch.empty(H, dtype=torch.bfloat16)),
        )
        keep.append(kept)
        lines.append(line(*kept, K, (), places, counts))
    hidden, slots, weights, verdicts = buffers(len(rows), H, K)
    table = host(torch.tensor(lines, dtype=torch.int64))
    collect(table, len(rows), hidden, slots, weights, verdicts)
    seen, counted = on_the_host(slots, counts)
    for i, (_, _, verdict) in enumerate(rows):
        assert int(verdicts[i, 1]) == verdict, (i, verdicts[i])
        assert seen[i].tolist() == ([0, 1, -1, -1] if verdict == 0 else [-1] * K)
        assert int(verdicts[i, 0]) == (2 if verdict == 0 else 0)
    assert counted.tolist() == [1, 1, 0, 0, 0, 0]
    wide = host(torch.tensor([2, 2**40, 3, 4]))  # beyond i32, in i64
    kept = (keep[0][0], wide, keep[0][2], keep[0][3])
    table = host(torch.tensor([line(*kept, K, (t.BF16, t.I64), places)], dtype=torch.int64))
    collect(table, 1, None, slots, weights, verdicts)
    settled()
    assert int(verdicts[0, 1]) == 2


def a_word_at_the_end():
    done = host(torch.zeros(1, dtype=torch.int32))
    signal(done)
    settled()
    assert done.item() == 1


CASES = {
    "rows of every type, bf16": lambda: rows_of_every_type(torch.bfloat16),
    "rows of every type, f32": lambda: rows_of_every_type(torch.float32),
    "e4m3 with scales": lambda: e4m3_with_scales(0),
    "e4m3 with scales, at an odd address": lambda: e4m3_with_scales(1),
    "rows as codes": lambda: rows_as_codes(False),
    "rows as codes, brought by somebody else": lambda: rows_as_codes(True),
    "wrong ids and weights": wrong_ids_and_weights,
    "a word at the end": a_word_at_the_end,
}

if __name__ == "__main__":
    answer_cases(CASES)
