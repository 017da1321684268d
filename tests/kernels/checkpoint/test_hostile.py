"""Broken and hostile checkpoints: each gives an error that names the tensor or the file, and nothing is half-loaded."""

from __future__ import annotations

import json
import os
import stat
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from costs import cheaper
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd_kernels.checkpoint import CheckpointError, open_checkpoint

PREFIX = "model.layers.1.mlp.experts"
E, H, I, G = 3, 64, 32, 32
SIZES = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
VICTIM = f"{PREFIX}.1.up_proj"

Change = Callable[[dict[str, Tensor]], None]


def tensors() -> dict[str, Tensor]:
    """A GPTQ layer with random codes."""
    g = torch.Generator().manual_seed(5)
    out = {}
    for e in range(E):
        for name, (n, k) in SIZES.items():
            out |= {
                f"{PREFIX}.{e}.{name}.qweight": torch.randint(-(2**31), 2**31, (k // 8, n), generator=g).int(),
                f"{PREFIX}.{e}.{name}.qzeros": torch.full((k // G, n // 8), 0x77777777).int(),
                f"{PREFIX}.{e}.{name}.scales": torch.rand(k // G, n, generator=g).half() + 0.1,
            }
    return out


QUANT = {"quant_method": "gptq", "bits": 4, "group_size": G, "sym": True, "desc_act": False}


@pytest.fixture
def sound(write_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint with nothing wrong, in two shards."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, tensors(), experts=E, hidden=H, intermediate=I, quant=QUANT, shards=2)
    return folder


def everything(folder: Path) -> None:
    """What a server does before it serves."""
    source = open_checkpoint(folder)
    for layer in source.layers:
        source.info(layer)
        source.load(layer)


def rewrite(folder: Path, change: Change) -> None:
    """The checkpoint as one file, changed."""
    files = sorted(folder.glob("*.safetensors"))
    merged = {n: t for f in files for n, t in load_file(f).items()}
    for f in [*files, *folder.glob("*.index.json")]:
        f.unlink()
    change(merged)
    save_file({n: t.contiguous().clone() for n, t in merged.items()}, folder / "model.safetensors")


def edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Replace the header, keep the data."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def shard_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def test_the_sound_one_loads(sound: Path) -> None:
    everything(sound)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{VICTIM}.scales"), rf"{VICTIM}: fits no known format.*'scales' is missing"),
        (lambda t: t.pop(f"{VICTIM}.qzeros"), rf"{VICTIM}: fits no known format.*'qzeros' is missing"),
        (
            lambda t: [t.pop(f"{VICTIM}.{s}") for s in ("qweight", "qzeros", "scales")],
            r"experts\.1\.up_proj: the projection is missing; layer 1 has 3 experts",
        ),
        (
            lambda t: [t.pop(n) for n in list(t) if f"{PREFIX}.2." in n],
            r"experts\.2\.gate_proj: the projection is missing; layer 1 has 3 experts",
        ),
        (
            lambda t: t.update({n.replace(".2.", ".3."): x.clone() for n, x in t.items() if f"{PREFIX}.2." in n}),
            r"experts\.3\.\w+: config\.json says 3 experts",
        ),
        (
            lambda t: t.update({f"{VICTIM}.scales": t[f"{VICTIM}.scales"][:1]}),
            rf"{VICTIM}\.scales: shape \[1, 32\], want \[2, 32\]",
        ),
        (
            lambda t: t.update({f"{VICTIM}.qweight": t[f"{VICTIM}.qweight"][:, :24]}),
            rf"{VICTIM}\.scales: shape \[2, 32\], want \[2, 24\]",
        ),
        (
            lambda t: t.update(
                {f"{VICTIM}.{s}": t[f"{PREFIX}.0.down_proj.{s}"] for s in ("qweight", "qzeros", "scales")}
            ),
            rf"{VICTIM}: 64 rows and 32 columns; want 32 and 64",
        ),
        (
            lambda t: t.update({f"{VICTIM}.qweight": t[f"{VICTIM}.qweight"].float()}),
            rf"{VICTIM}: fits no known format.*'qweight' is F32, want I32",
        ),
        (lambda t: t[f"{VICTIM}.scales"].__setitem__((1, 3), float("nan")), rf"{VICTIM}\.scales: a scale is NaN"),
        (
            lambda t: t[f"{VICTIM}.scales"].__setitem__((0, 0), float("-inf")),
            rf"{VICTIM}\.scales: a scale is NaN or inf",
        ),
        (
            lambda t: t.update({f"{VICTIM}.pre_quant_scale": torch.ones(H)}),
            rf"{VICTIM}: fits no known format.*gptq_v1 \(tensor 'pre_quant_scale' is not known\)",
        ),
        (
            lambda t: t.update({f"{PREFIX}.gate_up_proj": torch.zeros(E, 2 * I, H)}),
            r"gate_up_proj: fused experts beside single ones",
        ),
        (
            lambda t: t.update({n.replace("model.", "other."): x.clone() for n, x in t.items()}),
            r"two tensors for one place; say with --layer-template",
        ),
        (
            lambda t: [t.pop(n) for n in list(t)] and t.update({"model.norm.weight": torch.ones(4)}),
            r"no experts among its 1 tensors .*--layer-template",
        ),
    ],
)
def test_tensors_that_are_missing_or_do_not_fit(sound: Path, change: Change, says: str) -> None:
    rewrite(sound, change)
    with pytest.raises(CheckpointError, match=says):
        everything(sound)


def test_zero_and_negative_scales_are_legal(sound: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        t[f"{VICTIM}.scales"][0, 0], t[f"{VICTIM}.scales"][0, 1] = 0.0, -0.5

    rewrite(sound, change)
    w = open_checkpoint(sound).load(1)
    assert w.w13.scales is not None
    assert w.w13.scales[1, I, 0] == 0.0
    assert w.w13.scales[1, I + 1, 0] == -0.5


def _offsets(name: str, begin: int, end: int) -> Callable[[dict[str, Any]], None]:
    def change(h: dict[str, Any]) -> None:
        b, e = h[name]["data_offsets"]
        h[name]["data_offsets"] = [b + begin, e + end]

    return change


T = f"{VICTIM}.qweight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_offsets(T, -64, -64), rf"{VICTIM}\.qweight in model-.*: its bytes overlap those of"),
        (_offsets(T, 1 << 30, 1 << 30), rf"{VICTIM}\.qweight in model-.*but the file holds"),
        (_offsets(T, 0, -4), rf"{VICTIM}\.qweight in model-.*: I32 \[8, 32\] takes 1024 bytes, the header gives 1020"),
        (_offsets(T, 4096, 0), r"make no tensor"),
        (_offsets(T, -(1 << 40), 0), r"make no tensor"),
        (lambda h: h[T].update(shape=[8, -32]), r"make no tensor"),
        (lambda h: h[T].update(shape=[True, 32]), r"make no tensor"),
        (lambda h: h[T].update(shape="8x32"), r"make no tensor"),
        (lambda h: h[T].update(shape=[1 << 62, 1 << 62]), r"takes \d+ bytes, the header gives"),
        (lambda h: h[T].update(dtype="I64"), r"takes 2048 bytes, the header gives 1024"),
        (lambda h: h[T].update(dtype="F32"), r"'qweight' is F32, want I32"),
        (lambda h: h[T].update(dtype="I5"), r"'qweight' is I5, want I32"),
        (lambda h: h[T].pop("dtype"), r"want dtype, shape and data_offsets"),
        (lambda h: h.update({T: 7}), r"want dtype, shape and data_offsets"),
        (lambda h: h.pop(T), r"unused bytes before it|bytes after its last tensor"),
    ],
)
def test_headers_that_lie(sound: Path, change: Callable[[dict[str, Any]], None], says: str) -> None:
    edit_header(shard_of(sound, T), change)
    with pytest.raises(CheckpointError, match=says):
        everything(sound)


EVIL = "x\n2026-01-01T00:00:00Z INFO served\r\x1b[2J\x1b]0;title\x07\x9b31m\u202e\0" + "long" * 100_000


def _named(h: dict[str, Any], entry: Any) -> None:
    h[EVIL] = entry


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {"dtype": "I32", "shape": [8, 32], "data_offsets": [0, 1024]},
        {"dtype": "I32", "shape": [8, 32], "data_offsets": [0, 2**63]},
        {"dtype": EVIL, "shape": [EVIL], "data_offsets": [0, 1024]},
    ],
    ids=["a number", "an overlap", "2^63 bytes", "a shape of text"],
)
def test_a_name_forges_no_line_and_obeys_no_terminal(sound: Path, entry: Any) -> None:
    edit_header(shard_of(sound, T), lambda h: _named(h, entry))
    with pytest.raises(CheckpointError) as e:
        everything(sound)
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 10_000


@pytest.mark.parametrize("where", ["tensor", "file", "config"])
def test_what_an_index_or_a_configuration_says_forges_nothing_either(sound: Path, where: str) -> None:
    index = sound / "model.safetensors.index.json"
    if where == "config":
        edit_json(sound / "config.json", lambda c: c.update({"model_type": EVIL, "quantization_config": {EVIL: EVIL}}))
    elif where == "tensor":
        edit_json(index, lambda v: v["weight_map"].update({EVIL: shard_of(sound, T).name}))
    else:
        edit_json(index, lambda v: v["weight_map"].update({T: f"{EVIL[:40]}.safetensors"}))
    with pytest.raises(CheckpointError) as e:
        everything(sound)
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 10_000


def test_every_truncation_is_noticed(sound: Path) -> None:
    shard = shard_of(sound, T)
    data = shard.read_bytes()
    for length in [*range(16), 100, len(data) // 2, len(data) - 1]:
        shard.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=shard.name):
            open_checkpoint(sound)
    shard.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="1 bytes after its last tensor"):
        open_checkpoint(sound)


def test_a_file_that_shrinks_while_it_is_read(sound: Path) -> None:
    source = open_checkpoint(sound)
    shard = shard_of(sound, T)
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"ends \d+ bytes early"):
        source.load(1)


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff\xfe", b"[" * 100_000])
def test_headers_that_are_no_json_object(sound: Path, junk: bytes) -> None:
    shard = shard_of(sound, T)
    shard.write_bytes(struct.pack("<Q", len(junk)) + junk)
    with pytest.raises(CheckpointError, match=shard.name):
        open_checkpoint(sound)
    (sound / "config.json").write_bytes(junk)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(sound)


def test_a_header_length_beyond_the_limit(sound: Path) -> None:
    shard = shard_of(sound, T)
    shard.write_bytes(struct.pack("<Q", 1 << 63) + bytes(64))
    with pytest.raises(CheckpointError, match=r"header of 9223372036854775808 bytes"):
        open_checkpoint(sound)


def test_duplicate_tensors_in_two_shards(sound: Path) -> None:
    first, second = sorted(sound.glob("*.safetensors"))
    a, b = load_file(first), load_file(second)
    name = next(iter(a))
    save_file({**b, name: a[name]}, second)
    with pytest.raises(CheckpointError, match=rf"{name}: stands in {first.name} and in {second.name}"):
        open_checkpoint(sound)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model-00009-of-00002.safetensors", r"model-00009-of-00002\.safetensors: there is no such file"),
        (
            "../outside.safetensors",
            r"'\.\./outside\.safetensors', want the name of a safetensors file in the same folder",
        ),
        ("/etc/passwd", r"want the name of a safetensors file"),
        ("sub/../../outside.safetensors", r"want the name of a safetensors file"),
        ("config.json", r"want the name of a safetensors file"),
        ("..\\outside.safetensors", r"want the name of a safetensors file"),
    ],
)
def test_index_entries_that_lead_elsewhere(sound: Path, file: str, says: str) -> None:
    save_file(tensors(), sound.parent / "outside.safetensors")
    index = sound / "model.safetensors.index.json"
    edit_json(index, lambda v: v["weight_map"].update({T: file}))
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(sound)


def test_an_index_that_names_the_wrong_shard(sound: Path) -> None:
    index = sound / "model.safetensors.index.json"
    other = next(f.name for f in sound.glob("*.safetensors") if f != shard_of(sound, T))
    edit_json(index, lambda v: v["weight_map"].update({T: other}))
    with pytest.raises(CheckpointError, match=rf"{VICTIM}\.qweight: the index says it is in {other}"):
        open_checkpoint(sound)


@pytest.mark.parametrize("value", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_weight_map(sound: Path, value: Any) -> None:
    (sound / "model.safetensors.index.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_checkpoint(sound)


@pytest.mark.parametrize("victim", ["shard", "config.json", "model.safetensors.index.json"])
def test_links_out_of_the_folder(sound: Path, victim: str) -> None:
    path = shard_of(sound, T) if victim == "shard" else sound / victim
    moved = sound.parent / path.name
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(CheckpointError, match=rf"{path.name}: is a link out of the checkpoint folder"):
        open_checkpoint(sound)


def test_links_inside_the_folder_and_into_the_hub_cache(sound: Path) -> None:
    """<repo>/snapshots/<revision>/<file> -> ../../blobs/<hash> is the hub's cache; other links out are refused."""
    inner = sound / "data"
    inner.mkdir()
    shard = shard_of(sound, T)
    shard.rename(inner / "x")
    shard.symlink_to(inner / "x")
    everything(sound)
    repo = sound.parent / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(f for f in sound.iterdir() if f.is_file()):
        (repo / "blobs" / f"{i}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i}")
    everything(snapshot)
    assert open_checkpoint(snapshot).fingerprint == open_checkpoint(sound).fingerprint
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(sound / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: is a link out of"):
        open_checkpoint(snapshot)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("what", ["pipe", "folder", "socket", "sparse"])
def test_json_that_is_no_file(sound: Path, file: str, what: str) -> None:
    path = sound / file
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "socket":
        os.mknod(path, 0o600 | stat.S_IFSOCK)
    else:
        with path.open("wb") as f:
            f.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=rf"{file}: (is no regular file|cannot be opened)"):
        open_checkpoint(sound)


def test_files_that_are_no_files(sound: Path) -> None:
    shard = shard_of(sound, T)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: is no regular file"):
        open_checkpoint(sound)


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 128}, r"config\.json says hidden size 128"),
        ({"moe_intermediate_size": 64}, r"config\.json says .*intermediate size 64"),
        ({"num_experts": 4}, r"experts\.3\.gate_proj: the projection is missing; layer 1 has 4 experts"),
        ({"num_experts": 0}, r"num_experts is 0, want a number from 1 to"),
        ({"num_hidden_layers": 1}, r"experts in layers \[1\], but config\.json: num_hidden_layers is 1"),
        ({"quantization_config": None}, r"fits no known format; found no quantization_config"),
        ({"quantization_config": []}, r"quantization_config is a list, want an object"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors(sound: Path, changes: dict[str, Any], says: str) -> None:
    edit_json(sound / "config.json", lambda c: c.update(changes))
    with pytest.raises(CheckpointError, match=says):
        everything(sound)


def test_layers_and_experts_that_are_not_there(sound: Path) -> None:
    source = open_checkpoint(sound)
    with pytest.raises(KeyError, match="layer 0: this checkpoint has experts in layers 1"):
        source.info(0)
    with pytest.raises(KeyError, match="expert 3 of layer 1: it has experts 0 to 2"):
        source.load(1, [0, 3])


# ---- what costs time and memory --------------------------------------------------------------------------------------


def _put(entry: str, value: Any) -> Callable[[Path], None]:
    """Change one thing of every header entry of one shard, as its writer would not."""

    def change(folder: Path) -> None:
        path = sorted(folder.glob("*.safetensors"))[0]
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        name = next(n for n in header if n != "__metadata__")
        header[name][entry] = value
        text = json.dumps(header).replace('"LONG"', "7" * 4000).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return change


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        others = {name: value for name, value in changes.items() if name != "quant"}
        config["quantization_config"] |= changes.get("quant", {})
        path.write_text(json.dumps(config | others).replace('"LONG"', "7" * 4000))

    return change


COSTLY: dict[str, tuple[Callable[[Path], None], str]] = {
    "a billion layers": (
        _config(num_hidden_layers=10**9, first_k_dense_replace=1),
        "num_hidden_layers or num_layers is 1000000000, want a number from 1 to 10000",
    ),
    "a billion experts": (_config(num_experts=10**9), "num_experts.* is 1000000000, want a number from 1 to"),
    "a hidden size of a billion": (_config(hidden_size=10**9), "hidden_size.* is 1000000000"),
    "a number of 4,000 digits": (_config(num_experts_per_tok="LONG"), "config.json: .*a number of 4000 digits"),
    "a shape of a million numbers": (_put("shape", [3] * 10**6), "shape has 1000000 extents, want at most 8"),
    "a shape of 4,000 digits": (_put("shape", ["LONG", 3]), "header.*a number of 4000 digits, 777777777777"),
    "offsets of 4,000 digits": (_put("data_offsets", [0, "LONG"]), "header.*a number of 4000 digits"),
    "a pattern that goes back for ever": (
        _config(quant={"dynamic": {"+:(([a-z.0-9_]+)*)*Z": {"bits": 8}}}),
        "quantization_config: dynamic .* may take for ever",
    ),
    "a pattern with too many ways": (
        _config(quant={"extra_config": {".*" * 40 + "Z": {"bits": 8}}}),
        "quantization_config: extra_config .* steps on a name of",
    ),
}

A_MILLION = "[" + ",".join(["3"] * 10**6) + "]"
"""As many numbers as the largest of these headers has: 20 to 60 ms to read."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", COSTLY)
def test_what_costs_is_refused_before_it_is_paid(sound: Path, what: str) -> None:
    change, says = COSTLY[what]
    change(sound)

    def refused() -> None:
        with pytest.raises(CheckpointError, match=says):
            everything(sound)

    assert cheaper(refused, lambda: json.loads(A_MILLION), 15)
    tracemalloc.start()  # beside it everything takes longer
    try:
        with pytest.raises(CheckpointError, match=says) as e:
            everything(sound)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100e6
    assert len(str(e.value)) < 1000
