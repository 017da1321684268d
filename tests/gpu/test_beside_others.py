"""Answers beside other processes on the same GPU: it takes turns between them, and puts running kernels aside for it.

The processes run this file.  Each keeps its own answers of when it was alone, and compares bits.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from expertd_kernels import build, decide, detect_device, problem_of
from expertd_kernels.bench.cuda import shape_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.scheme import ActivationQuant, Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA, this machine has none"),
]

PROCESSES, TURN_S = 3, 6.0
CASES = ["e4m3_block128 e4m3_group128", "e4m3_channel e4m3_token", "int4_g128 none", "mxfp4 none", "bf16 none"]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each process says of each case: the same processes for all cases, since each takes seconds to begin."""
    folder = tmp_path_factory.mktemp("meeting")
    command = [sys.executable, __file__, str(folder)]
    processes = [
        subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for n in range(PROCESSES)
    ]
    return [p.communicate(timeout=220)[0] for p in processes]


@pytest.mark.parametrize("case", CASES)
def test_answers_beside_other_processes_have_the_bits_of_those_alone(case, said):
    for text in said:
        line = next((line for line in text.splitlines() if line.startswith(f"{case}: ")), text)
        assert line.endswith(" calls, 0 wrong"), line


def meet(folder: Path, name: str, me: int) -> None:
    (folder / f"{name}.{me}").touch()
    end = time.monotonic() + 120
    while len(list(folder.glob(f"{name}.*"))) < PROCESSES:
        assert time.monotonic() < end, f"{name}: the others did not come"
        time.sleep(0.005)


def main(folder: Path, me: int) -> None:
    for n, case in enumerate(CASES):
        compare(case, folder, f"case{n}", me)
        torch.cuda.empty_cache()


def compare(case: str, folder: Path, name: str, me: int) -> None:
    """Print how many answers of a case were wrong; the processes compute alone first, one after the other."""
    scheme, rounding = case.split()
    s = shape_of("deepseek-v3/64")
    w = random_weights(
        Scheme.parse(scheme), s.num_experts, s.hidden_size, s.intermediate_size, activation=s.activation, device="cuda"
    )
    asked = problem_of(w, detect_device("cuda"), top_k=s.top_k, activation_quant=ActivationQuant(rounding))
    layer = build(decide(asked), w)
    calls = []
    for turn in range(PROCESSES):
        meet(folder, f"{name}.alone{turn}", me)
        if turn == me:
            for M, at_once in ((8, 200), (64, 40), (256, 20), (2048, 1), (4096, 1)):
                x, ids, weights = random_inputs(M, s.hidden_size, s.num_experts, s.top_k, device="cuda")
                calls.append((x, ids, weights, layer(x, ids, weights).clone(), at_once))
            torch.cuda.synchronize()
    meet(folder, f"{name}.begin", me)
    count = wrong = 0
    end = time.monotonic() + TURN_S
    while time.monotonic() < end:
        for x, ids, weights, want, at_once in calls:
            outs = [torch.full_like(x, float("nan")) for _ in range(at_once)]
            for out in outs:
                layer(x, ids, weights, out=out)
            count += at_once
            wrong += sum(not torch.equal(out, want) for out in outs)
    meet(folder, f"{name}.end", me)
    print(f"{case}: {count} calls, {wrong} wrong", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
