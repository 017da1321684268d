"""The examples of docs/engines.md as they stand there, each in a process of its own, with a server of a tiny model."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_server
from hosts import hosts

import expertd_client
from expertd.errors import PlacementError, UnavailableError, UnsupportedCombinationError
from expertd_client.engines import settings

ROOT = Path(__file__).parents[2]
PAPER = (ROOT / "docs/engines.md").read_text()
EXAMPLES = {
    "transformers_model.py": "24 greedy tokens: equal",
    "own_engine.py": "together against one by one",
    "own_engine.py --compile": "together against one by one",
    "own_adapter.py": "2 layers at",
    "kt_wrapper.py": "2 experts here, 6 at",
}
"""A command of the page, less its arguments, and what it prints."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(checkpoint, address)"""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_server.make(folder)
    with hosts([{"checkpoint": folder}]) as [address]:
        yield folder, address


@pytest.fixture(autouse=True)
def connections_end_with_their_test():
    """An adapter's connection is its process's, which goes on here."""
    yield
    for key in list(settings._CONNECTIONS):
        settings._CONNECTIONS.pop(key).forwarder.close()


def commands():
    """Those of the page that call an example, as they stand there."""
    text = "\n".join(re.findall(r"```sh\n(.*?)```", PAPER, re.DOTALL)).replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*", "", line) for line in text.splitlines()]
    return [line for line in lines if "client/examples/" in line and "tiny_server" not in line]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_as_the_page_says(example, served):
    script, *options = example.split()
    found = [c for c in commands() if script in c and set(options) <= set(c.split())]
    assert found, f"docs/engines.md does not call {example}"
    checkpoint, address = served
    command = next(c for c in found if options or "--" not in c.partition(script)[2])
    command = command.replace("DIR", str(checkpoint)).replace("127.0.0.1:50051", address)
    words = re.sub(r"^((?:\w+=\S+ )*)python ", rf"\1{sys.executable} ", command)
    done = subprocess.run(
        words, shell=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert EXAMPLES[example] in done.stdout


def test_every_example_of_the_page_is_run():
    assert {re.search(r"examples/(\w+\.py)", c)[1] for c in commands()} == {e.split()[0] for e in EXAMPLES}


def test_the_adapter_has_sixty_lines_at_most():
    text = (ROOT / "client/examples/own_adapter.py").read_text()
    adapter = re.search(r"# ---- the adapter.*?\n(.*?)# ---- end of the adapter", text, re.DOTALL)[1]
    assert 10 < len([line for line in adapter.splitlines() if line.strip()]) <= 60


@pytest.mark.parametrize("example", ["own_adapter.py", "own_engine.py"])
def test_an_engine_of_your_own_imports_public_names_only(example):
    tree = ast.parse((ROOT / "client/examples" / example).read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not [name for name in modules if name.startswith("expertd")]
    ours = {(module, name) for module, name in names if module.startswith("expertd_client")}
    assert ours, "the example calls a server by the library"
    assert ours <= {("expertd_client", name) for name in expertd_client._MODULES}


def test_the_adapter_without_servers_says_what_it_wants(monkeypatch):
    monkeypatch.delenv("EXPERTD_ADDRESS", raising=False)
    sizes = {"experts": 8, "hidden_size": 256, "intermediate_size": 128}
    with pytest.raises(UnsupportedCombinationError, match="servers: got none in EXPERTD_ADDRESS, want"):
        expertd_client.RankExperts.from_environment("layer0.experts", 0, **sizes)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"experts": 9}, r"want 9 experts.* as in layer0\.experts"),
        ({"intermediate_size": 999}, r"want 8 experts.*, intermediate size 999 as in layer0\.experts"),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_the_adapter_compares_sizes_with_the_servers(served, other, says, several):
    sizes = {"experts": 8, "hidden_size": 256, "intermediate_size": 128, **other}
    address = f"{served[1]},{served[1].replace('127.0.0.1', 'localhost')}" if several else served[1]
    with pytest.raises(PlacementError, match=says):
        expertd_client.RankExperts.from_environment("layer0.experts", 0, given=address, **sizes)


@pytest.mark.parametrize("dead", [("127.0.0.1:9",), ("127.0.0.1:9", "127.0.0.1:10")])
def test_the_adapter_names_servers_that_are_not_up(dead):
    sizes = {"experts": 8, "hidden_size": 256, "intermediate_size": 128}
    given = {"address": list(dead), "start_timeout_s": 0.2}
    with pytest.raises(UnavailableError) as raised:
        expertd_client.RankExperts.from_environment("layer0.experts", 0, given=given, **sizes)
    assert all(f"{address}: " in str(raised.value) for address in dead)
    assert "refused" in str(raised.value)


def test_a_wrong_answer_is_an_error(served, monkeypatch, capsys):
    """Or the examples would show nothing."""
    import kt_wrapper

    real = kt_wrapper.reference
    monkeypatch.setattr(kt_wrapper, "reference", lambda weights, x, ids, scores: real(weights, x, ids, 1.01 * scores))
    checkpoint, address = served
    assert kt_wrapper.main(str(checkpoint), address) == 1
    assert "relative error" in capsys.readouterr().out
