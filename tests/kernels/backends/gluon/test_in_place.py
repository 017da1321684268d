"""Rows whose table says `in_place`: a call reads its hidden states for the last time before anything writes the output,
in kernels of their own, so that both may be the same memory.  Launches are looked at, nothing is compiled."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dry_gpu import layer
from triton.runtime.jit import JITFunction

from expertd_kernels.bench.cuda import shape_of
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.weights.scheme import ActivationQuant

CASES = [
    ("gluon_sm90", "qwen3-30b-a3b", "int4_g128", "none"),
    ("gluon_sm90", "qwen3-30b-a3b", "bf16", "none"),
    ("gluon_sm90", "gpt-oss-120b", "mxfp4", "none"),
    ("gluon_w8a8", "qwen3-30b-a3b", "e4m3_block128", "e4m3_group128"),
    ("gluon_w8a8", "qwen3-30b-a3b", "e4m3_channel", "e4m3_token"),
]
TOKENS = (1, 2, 8, 24, 64, 128, 256, 512, 1024, 2048, 4096, 9000)


def touched(args):
    """Addresses of the memory that a launch is given, of tensors and descriptors of them."""
    tensors = [t for a in args if isinstance(t := getattr(a, "base", a), torch.Tensor)]
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_output_is_written_when_no_input_is_read_any_more(case, monkeypatch):
    row, model, scheme, rounding = case
    experts, shape = layer(model, scheme, ActivationQuant(rounding)), shape_of(model)
    assert experts.backend == row
    launches = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: launches.append((self.__name__, args)))
    for tokens in TOKENS:
        launches.clear()
        x, out = (torch.empty(tokens, shape.hidden_size, dtype=torch.bfloat16) for _ in range(2))
        ids = torch.empty(tokens, shape.top_k, dtype=torch.int32)
        experts(x, ids, torch.empty(tokens, shape.top_k), out=out)
        reads, writes = (t.untyped_storage().data_ptr() for t in (x, out))
        pieces = -(-tokens // 8192)
        reading = [n for n, (_, args) in enumerate(launches) if reads in touched(args)]
        writing = [n for n, (_, args) in enumerate(launches) if writes in touched(args)]
        assert len(writing) == pieces, f"{tokens} tokens: one kernel writes the output, the last of its piece"
        assert len(reading) >= pieces
        if pieces == 1:
            assert writing == [len(launches) - 1]
            assert max(reading) < writing[0], f"{tokens} tokens: {[name for name, _ in launches]}"
        else:  # other rows of both
            assert reading[0] < writing[0] < reading[-1] < writing[-1]


def test_the_table_says_it_of_the_rows_that_were_looked_at():
    assert {b.name for b in BACKENDS if b.in_place} == {row for row, *_ in CASES}
