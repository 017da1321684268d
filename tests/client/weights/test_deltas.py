"""slime's delta folders: read as its trainer writes them, applied by the servers."""

from __future__ import annotations

import json
import zlib
from contextlib import ExitStack

import numpy as np
import pytest
import safetensors.numpy
import torch
import trained
from updating import Server

from expertd.errors import ChangeRefusedError
from expertd_client.weights import DeltaFolder, UpdateFailedError, Updater, publish_delta_folder

zstandard = pytest.importorskip("zstandard")
pytestmark = pytest.mark.timeout(120)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(algorithm, data):
    if algorithm == "adler32":
        return f"{zlib.adler32(data):08x}"
    return pytest.importorskip("xxhash").xxh3_128_hexdigest(data)


def write(folder, version, before, after, encoding="xor", algorithm="adler32"):
    """A version's folder, in two files, as UpdateWeightFromDiskDelta._write_delta_files does."""
    folder = folder / f"weight_v{version:06d}"
    folder.mkdir()
    found, sums = {}, {}
    for name, tensor in after.items():
        old, new = raw(before[name]), raw(tensor)
        if np.array_equal(old, new):
            continue
        diff = old ^ new
        if encoding == "overwrite":
            places = np.flatnonzero(diff).astype("<u4")
            diff = np.concatenate(
                [np.array([places.size], "<u4").view(np.uint8), places.view(np.uint8), new[diff != 0]]
            )
        found[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(diff.tobytes()), np.uint8)
        sums[name] = checksum(algorithm, new)
    names, where = sorted(found), {}
    for n, part in enumerate((names[::2], names[1::2])):
        file = f"model-{n:05d}-of-00002.safetensors"
        safetensors.numpy.save_file({k: found[k] for k in part}, folder / file, {k: sums[k] for k in part})
        where |= dict.fromkeys(part, file)
    facts = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": facts, "weight_map": where}))
    return folder


@pytest.fixture
def served(tmp_path):
    with ExitStack() as stack:
        base = trained.saved(tmp_path / "base", trained.step(1))
        server = Server(stack, trained.config(base, quantize="int4_g128", held=tmp_path / "held.json"))
        server.base, server.updater = base, stack.enter_context(Updater(server.host.address))
        yield server


def sparse(before, number):
    """A step that changes a few elements of some tensors."""
    after, g = {}, torch.Generator().manual_seed(number)
    for n, t in before.items():
        after[n] = t.clone()
        if ".experts.3." not in n:
            places = torch.randperm(t.numel(), generator=g)[:50]
            after[n].view(-1)[places] = (torch.randn(50, generator=g) * 0.3).to(t.dtype)
    return after


@pytest.mark.parametrize("algorithm", ["adler32", "xxh3-128"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_two_versions_one_after_another(encoding, algorithm, served, tmp_path):
    now, first = trained.step(1), served.answers()
    for version in (1, 2):
        after = sparse(now, version)
        folder = write(tmp_path, version, now, after, encoding, algorithm)
        assert publish_delta_folder(served.updater, folder, served.base) == 1 + version
        with ExitStack() as stack:
            whole = trained.saved(tmp_path / f"whole-{version}", after)
            want = Server(stack, trained.config(whole, quantize="int4_g128")).answers()
        assert served.answers() == want != first
        now = after
    assert served.client.describe().versions[0].label == "delta 2"


def test_a_wrong_base_a_wrong_sum_and_a_wrong_tensor_leave_the_old_version(served, tmp_path):
    now, first = trained.step(1), served.answers()
    after = sparse(now, 1)
    skipped = write(tmp_path, 3, now, after)
    with pytest.raises(UpdateFailedError, match="base: got 3, want 1, the version that is served"):
        publish_delta_folder(served.updater, skipped, served.base)
    other = write(tmp_path, 1, trained.step(9), after)  # of another base under the same number
    with pytest.raises(UpdateFailedError, match="adler32"):
        publish_delta_folder(served.updater, other, served.base)
    assert served.answers() == first
    assert [v.number for v in served.client.describe().versions] == [1]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"delta_encoding": "gzip"}, "want version, base_version and delta_encoding"),
        ({"version": "x"}, "want version"),
        ({"compression_format": "none"}, "got none, adler32, want zstd"),
        ({"checksum_format": "blake3"}, "got zstd, blake3"),
    ],
)
def test_a_folder_of_another_kind_is_refused(facts, says, tmp_path):
    now = trained.step(1)
    folder = write(tmp_path, 1, now, sparse(now, 1))
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    index.write_text(json.dumps({**found, "metadata": {**found["metadata"], **facts}}))
    with pytest.raises(ChangeRefusedError, match=says):
        DeltaFolder(folder)


def test_a_file_outside_of_the_folder_is_refused(tmp_path):
    now = trained.step(1)
    folder = write(tmp_path, 1, now, sparse(now, 1))
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"] = {"a": "../a.safetensors"}
    index.write_text(json.dumps(found))
    with pytest.raises(ChangeRefusedError, match="want one in the folder"):
        DeltaFolder(folder)
