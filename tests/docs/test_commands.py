"""Every command of the documents runs as it is printed, or stands below with the reason why it does not run here.
Those of the README, which everybody types first, run in `make test`, those of the other pages in `make soak`.

A new command that is neither is a failure.  Code spans in prose that name a command of this project are held against
its parser; the commands with their defaults run in tests/expertctl/test_defaults.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

import documents
import pytest
from as_printed import Namespace, Reader, filled, goes_on, lacking, no_namespace, whole
from documents import ROOT, Command

import expertd_client
from expertctl import cli as expertctl
from expertd_server.commands import cli as expertd


@dataclass(frozen=True)
class Rule:
    """pattern: matches a command from its beginning.  why: it does not run here, or not in `make test`."""

    pattern: str
    why: str


NOT_HERE = (
    Rule(r"(\S*/)?pip |python3 -m venv|.*&& pip ", "needs a package index; make setup and make wheel install from one"),
    Rule(r"make ", "a run of its own: CI runs `make vendor check`, and `make demo` is tests/deploy and tests/models"),
    Rule(r"git clone", "needs the repository's address"),
    Rule(r"\. \S*activate", "changes the shell of whoever types it; the commands below it are found without it"),
    Rule(r"docker |kind ", "needs Docker; tests/deploy/test_images.py runs the steps of an image"),
    Rule(r"expertctl plan .*--window", "needs calls of others while it counts"),
    Rule(r"helm |kubectl ", "needs a cluster; tests/deploy/test_chart.py renders the chart"),
    Rule(r"systemctl |journalctl |install -D|install -m", "needs systemd and root; tests/deploy checks the unit"),
    Rule(r"promtool ", "tests/deploy/test_alerts.py runs it where it is installed"),
    Rule(r"nvidia-smi", "needs a GPU"),
    Rule(r"vllm |python -m sglang", "needs the engine and a GPU; tests/engines has its plugin"),
    Rule(
        r"python client/examples/accuracy.py .*--(tasks|checkpoint)",
        "needs lm-eval or a checkpoint; tests/models/test_accuracy.py",
    ),
    Rule(r"OTEL_", "needs a collector; tests/rpc/test_traces.py has an exporter of its own"),
    Rule(r"expertctl ray |ray start", "needs a Ray cluster; tests/expertctl/ray starts one"),
    Rule(
        r"expertctl apply|expertctl plan --offline",
        "needs a placement; tests/rpc/test_apply.py, tests/expertctl/planner",
    ),
    Rule(r"expertd serve --checkpoint DIR --experts 0-63", "needs a checkpoint with 64 experts"),
    Rule(
        r"expertd serve --checkpoint DIR --quantize", "needs unquantized weights; tests/server/commands/test_verify.py"
    ),
    Rule(r"kill -USR1", "needs the number of a process; tests/faults/test_server_sigterm.py sends the signal"),
    Rule(r"python -m flashinfer", "needs FlashInfer, which fetches what a GPU needs"),
    Rule(r"python -m (expertd.cxx|expertd_kernels.native.csrc.build)", "compiles for a minute, as make setup does"),
    Rule(r"python -m expertd_server.engine.refusal_texts", "writes a source file; tests/server/engine compares it"),
    Rule(r"python (-m expertd_kernels.bench|kernels/bench/)", "measures for minutes; tests/kernels/bench"),
    Rule(
        r"python tests/load/|python tests/faults/mutate.py", "attacks or measures for minutes; tests/load, tests/faults"
    ),
    Rule(
        r"python client/examples/(tiny_server|transformers_model|own_engine|own_adapter|kt_wrapper).py",
        "tests/models/test_engine_examples.py runs it",
    ),
    Rule(r"python tests/engines/signatures.py", "writes records; tests/engines/test_versions.py compares with them"),
    Rule(r"expertctl (record|replay) |expertctl load 127.0.0.1:50061", "three terminals; tests/rpc/test_record.py"),
    Rule(
        r"expertctl (update|versions) HOST1|expertd serve --checkpoint DIR --shard 0/2 --admin-listen",
        "needs servers with an admin port; tests/expertctl/commands/test_update.py",
    ),
    Rule(r"openssl |echo subjectAltName", "writes keys; tests/rpc/test_security.py has certificates of its own"),
    Rule(
        r"expertd serve .*--shard \d/2.* --admin-listen|expertctl (update|versions) 10\.",
        "needs a checkpoint and hosts; tests/expertctl/commands/test_update.py",
    ),
    Rule(r"python -m pytest ", "is a test itself"),
    Rule(r"(\S*/)?python deploy/", "builds for minutes; tests/deploy"),
    Rule(r"buf (lint|build|breaking)\b", "make lint runs it"),
    Rule(r"grpcurl .*channelz", "needs a number that another answer has; tests/rpc/test_channelz.py"),
)
NOT_HERE_PYTHON = (
    Rule(r"(?s).*\.svc:", "needs the name of a Kubernetes Service"),
    Rule(r"(?s).*\"10\.0\.0\.", "needs other hosts"),
    Rule(r"(?s).*all_gather_object", "needs a group of ranks; tests/rpc/test_engines_docs.py makes one"),
    Rule(r"(?s).*127.0.0.1:50051\", \"127.0.0.1:50052", "needs two halves; tests/rpc/test_engines_docs.py starts them"),
)
LONG = (
    Rule(r"expertd serve +--synthetic qwen3-30b-a3b", "packs layers of a real size"),
    Rule(r"ghz ", "takes as long as it is told to"),
)
"""In `make soak`, as are all that are not of FIRST.  What does not run in `make test` is held against its parser."""
FIRST = ("README.md",)
_OWN = """hidden_states topk_ids topk_weights tokenizer model other_model layer layers client shared_experts prompt
experts step ranks cpu_group"""
READERS_OWN = frozenset(_OWN.split())
"""Names in Python blocks that are the reader's: such a block is read, its imports run, and it is not run."""

COMMANDS = documents.everything()
OURS = {"expertd": expertd, "expertctl": expertctl}
PACKAGES = {"expertd": "expertd_server", "expertctl": "expertctl"}


def why_not(command: Command) -> str:
    """The reason of a command that does not run here."""
    if command.kind == "python":
        missing = documents.free_names(command.text) & READERS_OWN
        if missing:
            return f"{', '.join(sorted(missing))}: the reader's own"
        return next((r.why for r in NOT_HERE_PYTHON if re.match(r.pattern, command.text)), "")
    if not whole(command):
        return "a part of it is left out"
    bare = re.sub(r"^([A-Z_]+=\S+ +)+", "", command.text)
    return next((r.why for r in NOT_HERE if re.match(r.pattern, command.text) or re.match(r.pattern, bare)), "")


def is_soak(command: Command) -> bool:
    """Whether it runs in `make soak` alone."""
    return command.page not in FIRST or is_long(command)


def is_long(command: Command) -> bool:
    return any(re.match(rule.pattern, command.text) for rule in LONG)


KNOWN = frozenset(
    {"expertd", "expertctl", "python", "buf", "grpcurl", "ghz", "perf_analyzer", "echo", "sh", "curl", "git"}
)
"""Programs that run here; any other one has to be listed, and is not run before."""


def is_mention(command: Command) -> bool:
    """A code span in prose that names a command of ours."""
    return command.kind == "span" and command.program in OURS


def runs() -> list[object]:
    """The same text twice is run once, where it stands first."""
    out, seen = [], set()
    for c in COMMANDS:
        if not is_mention(c) and not why_not(c) and c.program in KNOWN and c.text not in seen:
            seen.add(c.text)
            marks = [pytest.mark.soak] if is_soak(c) else []
            out.append(pytest.param(c.page, c, id=str(c), marks=marks))
    return out


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    if why := no_namespace():
        pytest.skip(why)
    found = Namespace()
    yield found
    found.close()


@pytest.fixture(scope="module")
def reader(request, namespace, tmp_path_factory) -> Iterator[Reader]:
    """Of one page."""
    with Reader(namespace, tmp_path_factory.mktemp("page")) as found:
        yield found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("reader", "command"), runs(), indirect=["reader"])
def test_it_runs_as_it_is_printed(reader, command):
    if tool := lacking(command):
        pytest.skip(f"{tool} is not installed")
    if not goes_on(command):
        said = reader.run(command)
        for line, expected in zip(said.splitlines(), documents.printed(command.text), strict=False):
            assert expected.startswith(line), f"{command}: printed {line!r}, the comment says {expected!r}"
        silent = command.kind == "python" or ">" in command.text or " -o " in command.text
        assert said.strip() or silent, f"{command}: printed nothing"
        return
    reader.start(command)
    if is_long(command):
        reader.stop(command)  # what stands below it calls another one


def test_every_command_is_run_or_has_a_reason():
    """Or it is a program that nobody has thought about yet."""
    left = [str(c) for c in COMMANDS if not is_mention(c) and not why_not(c) and c.program not in KNOWN]
    assert not left, "neither run nor listed: " + "; ".join(left)


def test_the_documents_have_what_these_tests_run():
    texts = {c.text for c in COMMANDS}
    assert {"make demo", "make test"} <= texts
    ran = [c for c in COMMANDS if not is_mention(c) and not why_not(c)]
    assert {"expertd", "expertctl", "buf", "python"} <= {c.program for c in ran}
    assert len(ran) > 20


def parser_of(program: str, name: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f"{PACKAGES[program]}.commands.{name}")
    subparsers = argparse.ArgumentParser().add_subparsers()
    module.add_parser(subparsers, *([""] if program == "expertctl" else []))
    return subparsers.choices[name]


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Of the parser and of those below it."""
    out = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            out |= {*action.choices, *(o for p in action.choices.values() for o in options_of(p))}
    return out


def wrong_words(command: Command) -> list[str]:
    """Options and names of commands that there are not."""
    words = filled(command.text).replace("...", "").split() if not whole(command) else command.words
    words = words[words.index(command.program) + 1 :] if command.program in words else words[1:]
    if not words or words[0].startswith("-"):
        return []
    name = words[0].rstrip(":")
    if name not in OURS[command.program].COMMANDS:
        return [name]
    there = options_of(parser_of(command.program, name)) | ({"--cache", "--insecure"} if name == "ray" else set())
    return [w for w in words if w.startswith("--") and w != "--" and w.partition("=")[0] not in there]


CHECKED = [
    c for c in COMMANDS if c.kind != "python" and c.program in OURS and (is_mention(c) or why_not(c) or is_soak(c))
]


@pytest.mark.parametrize("command", CHECKED, ids=str)
def test_what_is_not_run_names_commands_and_options_that_there_are(command):
    assert not wrong_words(command)


def is_public(name: str) -> bool:
    """Whether it is a package, or a name of the client's library."""
    return importlib.util.find_spec(name) is not None or hasattr(expertd_client, name)


PARTS = [c for c in COMMANDS if c.kind == "python" and (why_not(c) or is_soak(c))]


@pytest.mark.parametrize("block", PARTS, ids=str)
def test_parts_of_programs_import_what_there_is(block):
    unknown = documents.free_names(block.text) - READERS_OWN
    others = "".join(c.text for c in COMMANDS if c.kind == "python" and c.page == block.page and c.line < block.line)
    unknown = {n for n in unknown if not re.search(rf"\b{n}\b", others) and not is_public(n)}
    assert not unknown, f"{block}: nothing defines {unknown}"
    text = documents.imports(block.text)
    # tritonclient has messages of its own by the names of those that this process may have loaded
    if re.search(r"\b(torch|transformers|ray|vllm|sglang|tritonclient)\b", text) is None:
        exec(text, {})


def test_targets_and_scripts_of_the_documents_exist():
    targets = documents.targets((ROOT / "Makefile").read_text())
    named = {c.words[1] for c in COMMANDS if c.kind != "python" and c.program == "make"}
    assert named <= targets
    missing = [str(c) for c, path in documents.scripts(COMMANDS) if not (ROOT / path).is_file() and "NAME" not in path]
    assert not missing


def test_extras_of_the_documents_exist():
    declared = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for page in documents.pages():
        for names in re.findall(r"(?:'\.|'expertd|\.whl)\[([\w,]+)\]", page.read_text()):
            assert set(names.split(",")) <= declared, page


def texts() -> Iterator[tuple[str, str]]:
    for path in [*documents.pages(), *documents.deploy_files()]:
        yield str(path.relative_to(ROOT)), path.read_text()


PORTS = {*range(50051, 50070), 50151, 50152, 9464, 4317, 9100, 10001}
"""50051: gRPC; from there on: servers beside it on one host, AdminService, a proxy.  50151: AdminService beside two
servers.  9464: metrics.  4317, 9100: those
of OTLP and of the node exporter.  10001 is the image's user."""


def test_documents_have_one_port_for_each_purpose():
    port = re.compile(r"(?<=[a-zA-Z0-9\]])(?<!rsa):(\d{4,5})\b(?!\.\d)")
    named = [(name, int(n)) for name, text in texts() for n in port.findall(text)]
    assert len(named) > 40
    assert not [found for found in named if found[1] not in PORTS]


def test_a_package_of_an_index_is_named_where_there_is_one():
    """Nothing is published: expertd comes from a checkout, or from a folder with its wheel."""
    for name, text in texts():
        for line in text.splitlines():
            if re.search(r"pip install [^&|`]*'?expertd(\[| |'|$)", line):
                assert "--find-links" in line or ".whl" in line, f"{name}: {line}"


def test_security_names_a_contact():
    assert "Contact: " in (ROOT / "SECURITY.md").read_text().partition("\n## ")[0]


PAGE = """# A page
Say `make demo`, `expertctl load` or `x`.

    make wheel [MACHINES=x]

```sh
expertd serve --checkpoint DIR   # it's here
buf curl -d '{"a": 1,
  "b": 2}' http://127.0.0.1:50051/X
expertctl load 127.0.0.1 \\
    --m 8
```
```python
import json
print(json.dumps(x))   # 3
```
"""


def test_how_commands_are_found():
    found = documents.in_page("P.md", PAGE)
    assert [(c.line, c.kind, c.program) for c in found] == [
        (2, "span", "make"), (2, "span", "expertctl"), (4, "sh", "make"), (7, "sh", "expertd"), (8, "sh", "buf"),
        (10, "sh", "expertctl"), (14, "python", "python"),
    ]  # fmt: skip
    assert found[3].text == "expertd serve --checkpoint DIR"
    assert found[5].words == ["expertctl", "load", "127.0.0.1", "--m", "8"]
    assert documents.free_names(found[6].text) == {"x"}
    assert documents.printed(found[6].text) == ["3"]
    with pytest.raises(ValueError, match="ends within a command"):
        documents.in_page("P.md", "```sh\necho 'a\n```\n")


def test_wrong_words_are_seen():
    wrong = Command("P.md", 1, "span", "expertd serve --max-token-count 3")
    assert wrong_words(wrong) == ["--max-token-count"]
    assert wrong_words(Command("P.md", 1, "span", "expertctl laod X")) == ["laod"]
    assert why_not(Command("P.md", 1, "sh", "rm -rf build")) == ""
