"""A server that cannot start says why in one line on stderr and shows no traceback.  Its exit code is 2 where an option
or the file that it names is wrong, and 1 where the next start may succeed."""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
from pathlib import Path

import pytest

from expertd_kernels import Device, decide
from expertd_kernels.oracle.probe import installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_server.commands.cli import main

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gptq-w4-g128-sym-descact-false-qwen3moe1l"
TINY = ("--synthetic", "tiny:int4_g128", "--device", "cpu", "--backend", "reference")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy of the GPTQ checkpoint, to be spoilt."""
    folder = tmp_path / "checkpoint"
    ignore = shutil.ignore_patterns("expected.safetensors")
    shutil.copytree(FIXTURE, folder, ignore=ignore, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    return folder


LOGGED = re.compile(r"\d{4}-\d\d-\d\dT\S+Z (DEBUG|INFO|WARNING) ")
"""A line of the log, on stderr, too: of what this machine lacks, or of another test's server that ends late."""


def refusal(capsys, *args: str, code: int = 2) -> str:
    """The one line of `expertd serve` that refuses."""
    status = main(["serve", "--listen", "127.0.0.1:0", *args])
    out = capsys.readouterr()
    told = [line for line in out.err.splitlines() if not LOGGED.match(line)]
    assert (status, len(told)) == (code, 1), out.err
    assert told[0].startswith("expertd serve: "), out.err
    assert "serving on" not in out.out
    return told[0]


def set_config(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("option", ["--listen", "--metrics-listen", "--tcp-listen", "--admin-listen"])
def test_port_in_use(capsys, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        text = refusal(capsys, *TINY, option, where, code=1)
    assert text.startswith(f"expertd serve: {option} {where}: cannot listen there: Address already in use")


def test_an_address_that_is_not_ours(capsys):
    for where in ("192.0.2.1:50051", "no.such.host.invalid:0"):
        assert "cannot listen there" in refusal(capsys, *TINY, "--listen", where, "--insecure")


def test_no_folder(capsys, tmp_path):
    assert "nowhere" in refusal(capsys, "--checkpoint", str(tmp_path / "nowhere"))


def test_no_config(capsys, checkpoint):
    (checkpoint / "config.json").unlink()
    assert "config.json" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_config_that_is_no_json(capsys, checkpoint):
    (checkpoint / "config.json").write_text("{")
    assert "config.json" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_missing_weights(capsys, checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert "safetensors" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_truncated_weights(capsys, checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_a_header_longer_than_the_file(capsys, checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])
    assert "model.safetensors" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_a_header_that_lies_about_a_tensor(capsys, checkpoint):
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    name = next(n for n in header if n.endswith("experts.3.up_proj.qweight"))
    header[name]["shape"] = [2 * n for n in header[name]["shape"]]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    assert "experts.3.up_proj.qweight" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_unsupported_bits(capsys, checkpoint):
    (checkpoint / "quantize_config.json").unlink(missing_ok=True)
    set_config(checkpoint, lambda c: c["quantization_config"].update(bits=3))
    assert "3" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_quantized_tensors_without_quantization_fields(capsys, checkpoint):
    (checkpoint / "quantize_config.json").unlink(missing_ok=True)
    set_config(checkpoint, lambda c: c.pop("quantization_config"))
    assert "quantization" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_no_experts(capsys, checkpoint):
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + size].replace(b".experts.", b".exqerts.")
    path.write_bytes(data[:8] + text + data[8 + size :])
    assert "experts" in refusal(capsys, "--checkpoint", str(checkpoint))


def test_an_unknown_family_lists_the_known_ones(capsys, checkpoint):
    set_config(checkpoint, lambda c: c.update(model_type="zebra", architectures=["ZebraForCausalLM"]))
    text = refusal(capsys, "--checkpoint", str(checkpoint))
    assert "zebra" in text.lower()
    assert "qwen3_moe" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--synthetic", "zebra:int4_g128"), "models: qwen3-30b-a3b"),
        (("--synthetic", "tiny:int5"), "scheme 'int5'"),
        ((*TINY, "--layers", "7"), "layer 7 has no experts; layers with experts: 0-1"),
        ((*TINY, "--experts", "0-8"), "layer 0 has the experts 0 to 7"),
        ((*TINY, "--shard", "8/9"), "too few for 9 shards"),
        ((*TINY, "--backend", "zebra"), "--backend: got zebra, want for 'zebra' one of aiter, cpu"),
        ((*TINY, "--backend", "layers.0=reference,layers.1=tritom,*=auto"), "want for 'tritom' one of"),
        ((*TINY, "--backend", "layers.1-2=cpu,*=auto"), "layer 2 has no experts; layers with experts: 0-1"),
        (
            (*TINY, "--backend", "cpu_torch", "--deterministic", "batches"),
            "--backend cpu_torch does not serve layer 0",
        ),
        ((*TINY, "--device", "zebra"), "want auto, cpu, cuda[:N], rocm[:N] or xpu[:N]"),
        ((*TINY, "--quantize", "int4_g128"), "is int4_g128 already"),
        ((*TINY, "--max-tokens", "none"), "--max-tokens: got 'none'"),
        ((), "got neither, want one of them"),
    ],
)
def test_wrong_options(capsys, args, says):
    assert says in refusal(capsys, *args)


def test_a_pinned_backend_that_does_not_serve_is_refused_and_the_table_says_why(capsys, monkeypatch):
    from dataclasses import replace

    from expertd_kernels.oracle import table

    rows = [replace(b, activations=frozenset()) if b.name == "reference" else b for b in table.BACKENDS]
    monkeypatch.setattr(table, "BACKENDS", tuple(rows))
    assert main(["serve", *TINY, "--listen", "127.0.0.1:0"]) == 2
    out = capsys.readouterr()
    assert "--backend reference does not serve layer 0, int4_g128 on cpu" in out.err
    assert "does not compute silu_and_mul" in out.out


def test_a_compiled_kernel_that_cannot_be_used_is_said_where_it_slows_loading_and_in_the_table(
    monkeypatch, caplog, checkpoint_folder
):
    """A stale shared object: loading goes on with torch, and nobody has to wonder why it takes longer."""
    from expertd_kernels.checkpoint import open_checkpoint, repack
    from expertd_kernels.native import library as native

    why = "cpu kernel: libexpertd_cpu.so was made of other sources than those that lie there: abc, not def"
    for module in (native, repack):
        monkeypatch.setattr(module, "kernel_error", lambda: why)
    repack.uses_library.cache_clear()
    try:
        source = open_checkpoint(checkpoint_folder("gptq-w4-g128-sym-descact-false-qwen3moe1l"))
        source.load(0)
        source.load(0)
    finally:
        repack.uses_library.cache_clear()
    assert [r.getMessage() for r in caplog.records if "torch" in r.getMessage()] == [
        f"checkpoint: packed weights are repacked with torch, 3 to 8 times slower, because {why}"
    ]
    packages = installed_packages(BACKENDS)
    problem = source.info(0).problem(Device("cpu", "x86_64"), packages=packages)
    verdict = next(v for v in decide(problem).verdicts if v.backend == "cpu")
    assert why in verdict.refusals[0]
