"""fetch_vendor.py: what is asked for, what of a wheel stays."""

import re
import zipfile
from pathlib import Path

import fetch_vendor
import pytest


def test_every_pin_of_the_list_has_a_version_and_a_hash():
    folders = fetch_vendor.wanted(fetch_vendor.LIST.read_text())
    assert {name.rsplit("-", 3)[0] for name in folders} == {
        "amd-aiter", "flashinfer-python", "sgl-deep-gemm", "sglang", "vllm-xpu-kernels",
    }  # fmt: skip
    with pytest.raises(ValueError, match="want NAME==VERSION --hash=sha256:HASH, this is numpy==2"):
        fetch_vendor.wanted("# a comment\n\nnumpy==2\n")


def test_of_a_wheel_only_what_tests_read_is_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name in ("aiter/ops/shuffle.py", "aiter/lib.so", "aiter_meta/x.py", "../aiter/out.py", "flashinfer/cli.py"):
            wheel.writestr(name, "text")
    fetch_vendor.unpack(tmp_path / "a.whl", tmp_path / "made")
    found = [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*")) if p.is_file()]
    assert found == ["a.whl", "made/aiter/ops/shuffle.py"]


def test_a_wheel_without_them_is_an_error_and_leaves_no_folder(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("other/x.py", "text")
    with pytest.raises(ValueError, match=r"a\.whl has none of the files"):
        fetch_vendor.unpack(tmp_path / "a.whl", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_what_is_there_is_not_fetched_again_and_another_pin_is(tmp_path, monkeypatch):
    fetched = []

    def fetch(line: str, folder: Path, keep: object) -> None:
        fetched.append(line)
        folder.mkdir()

    monkeypatch.setattr(fetch_vendor, "PLACE", tmp_path / "vendor")
    monkeypatch.setattr(fetch_vendor, "LIST", tmp_path / "list")
    monkeypatch.setattr(fetch_vendor, "fetch", fetch)
    for digest, count in (("a" * 64, 1), ("a" * 64, 1), ("b" * 64, 2)):
        (tmp_path / "list").write_text(f"x==1 --hash=sha256:{digest}\n")
        assert fetch_vendor.main() == 0
        assert len(fetched) == count
        (folder,) = (tmp_path / "vendor").iterdir()
        assert folder.name.startswith(f"x-1-{digest[:16]}-")
    monkeypatch.setattr(fetch_vendor, "KEPT", re.compile("other"))
    assert fetch_vendor.main() == 0
    assert len(fetched) == 3, "another choice of files is fetched again"
