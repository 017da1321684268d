"""Generated pages say what the code says today, links lead somewhere, and lines can be read."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

import rooms
from decisions import cited, decided
from layers import layered, room_of
from pages import PAGES

ROOT = Path(__file__).parents[2]
FOLDERS = {ROOT, ROOT / "docs", ROOT / "docs/log", ROOT / "kernels/bench/results", *ROOT.glob("[a-z]*/")} - {
    ROOT / "node_modules"
}
PAPERS = sorted(p for folder in FOLDERS for p in folder.glob("*.md"))
READ = [p for p in PAPERS if "results" not in p.parts]
"""Papers that are read line by line: the tables of results are made of figures."""
MOST_COLUMNS = 150


@pytest.mark.timeout(300)  # the survey asks every rule about every model: 10 s of a core that is free
@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"docs/rooms.svg"}))
def test_generated_files_are_up_to_date(name):
    assert (ROOT / name).read_text() == PAGES[name](), f"{name} is stale: run `make docs` and read the diff"


def _drawn(svg):
    """The picture without its numbers of imports and modules, which change with every other commit."""
    return re.sub(r"(?<=>)\d+(?= imports<| modules?<|<)|(?<=contract )\d+|(?<=kernels )\d+|(?<=module)s", "#", svg)


def test_the_picture_of_the_rooms_has_every_room_and_every_arrow():
    drawn, now = _drawn((ROOT / "docs/rooms.svg").read_text()), _drawn(PAGES["docs/rooms.svg"]())
    assert drawn == now, "docs/rooms.svg is stale: run `make docs`, look at it, and at docs/architecture.md"


@pytest.mark.parametrize("package", rooms.PACKAGES)
def test_every_room_is_named_in_the_architecture(package):
    named = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE))
    assert rooms.read().rooms[package].keys() <= named


def test_rooms_that_import_each_other_in_a_circle_are_red():
    found = layered(["a", "b", "c"], {("a", "b"): 5, ("b", "c"): 4, ("c", "a"): 1})
    assert found.back == {("c", "a")}
    assert [found.floor[n] for n in "abc"] == [2, 1, 0]
    names, down = dict.fromkeys("abc", 1), {("a", "b"): 5, ("b", "c"): 4}

    def drawn(arrows):
        return rooms.draw(rooms.Rooms(dict.fromkeys(rooms.PACKAGES, names), dict.fromkeys(rooms.PACKAGES, arrows), {}))

    assert 'class="up"' not in drawn(down)
    assert drawn({**down, ("c", "a"): 1}).count('class="up"') == len(rooms.PACKAGES)


def test_what_stands_on_a_floor_does_not_overlap():
    nodes = [f"n{i}" for i in range(9)]
    found = layered(nodes, {(a, b): 1 for i, a in enumerate(nodes) for b in nodes[i + 2 :: 3]})
    for row in found.floors:
        for left, right in pairwise(row):
            apart = (room_of(left) + room_of(right)) / 2
            assert found.place[right] - found.place[left] >= apart - 1e-9
    for (a, b), way in found.ways.items():
        assert (way[0], way[-1]) == (a, b)
        assert len(way) == found.floor[a] - found.floor[b] + 1, "an arrow has a place on every floor that it passes"


@pytest.mark.parametrize("folder", ["proto", "kernels", "server", "client", "deploy", "tests"])
def test_each_top_folder_says_what_is_in_it(folder):
    assert len((ROOT / folder / "README.md").read_text().splitlines()) <= 30


def test_the_papers_are_found():
    assert {"README.md", "CHANGELOG.md", "docs/kernels.md", "docs/log/README.md"} <= {
        str(p.relative_to(ROOT)) for p in READ
    }


def _anchors(text):
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("paper", PAPERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(paper):
    text = re.sub(r"```.*?```", "", paper.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (paper.parent / path).resolve() if path else paper
        assert file.exists(), f"{paper.name}: the link to {target} leads nowhere"
        assert not anchor or anchor in _anchors(file.read_text()), f"{paper.name}: {target} has no such heading"


@pytest.mark.parametrize("paper", READ, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_can_be_read(paper):
    """Rows of tables may be longer: Markdown cannot wrap them."""
    lines = [(n, line) for n, line in enumerate(paper.read_text().splitlines(), 1) if not line.startswith("|")]
    long = [f"{n}: {len(line)}" for n, line in lines if len(line) > MOST_COLUMNS]
    assert not long, f"{paper.name}: lines beyond {MOST_COLUMNS} columns (line: columns): {', '.join(long)}"


CODE = ("proto", "kernels", "server", "client", "deploy", "pyproject.toml")


def test_every_decision_is_cited_from_the_code_and_the_code_cites_no_other():
    there, named = decided((ROOT / "DECISIONS.md").read_text()), cited(ROOT, CODE)
    assert not there.keys() - named.keys(), "cite these from the code that they explain, or delete them"
    assert not {n: files for n, files in named.items() if n not in there}, "DECISIONS.md has no such number"


def test_the_decisions_are_short():
    assert len((ROOT / "DECISIONS.md").read_bytes()) <= 25_000, "shorten or delete what the code itself explains"


DECISIONS = """# D

## 1. One thing (2026-11-21)
Text.

## 3. `--x` and others' (2026-11-22)
More.
"""


def test_decisions_are_found_by_number(tmp_path):
    assert decided(DECISIONS) == {1: "One thing", 3: "`--x` and others'"}
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("# decisions 3, 12 and 7: why\n")
    (tmp_path / "b.toml").write_text("# see decision 3.\n")
    assert cited(tmp_path, ["code", "b.toml"]) == {3: ["b.toml", "code/a.py"], 7: ["code/a.py"], 12: ["code/a.py"]}


@pytest.mark.parametrize(
    "heading", ["## Without a number (2026-11-22)", "## 3. Out of turn (2026-11-22)", "## 4. No date"]
)
def test_a_decision_of_another_form_is_told_what_is_wanted(heading):
    with pytest.raises(ValueError, match=r"want '## N\. Title \(2026-12-31\)' with N above 3"):
        decided(f"{DECISIONS}\n{heading}\n")


def test_the_readme_quotes_one_committed_run():
    """Each row of its table of times stands in the results of that run, number for number."""
    run = (ROOT / "kernels/bench/results/beside_h200.md").read_text()
    committed = [[cell.strip() for cell in line.split("|")[3:-1]] for line in run.splitlines() if line.startswith("| ")]
    table = (ROOT / "README.md").read_text().partition("## Performance")[2].partition("Method:")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    quoted = [[cell.strip() for cell in line.split("|")[3:-1]] for line in lines]
    assert len(quoted) == 4
    assert all(row in committed for row in quoted)


@pytest.mark.parametrize("paper", READ, ids=lambda p: str(p.relative_to(ROOT)))
def test_extras_that_are_installed_are_there(paper):
    declared = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    named = re.findall(r"pip install [^\n]*?(?:\.|\.whl|expertd)\[([\w,]+)\]", paper.read_text())
    assert {extra for names in named for extra in names.split(",")} <= declared


SOURCES = {
    "proto": (ROOT / "proto/expertd",),
    "kernels": (ROOT / "kernels/expertd_kernels", ROOT / "kernels"),
    "server": (ROOT / "server/expertd_server",),
    "echo": (ROOT / "server/expertd_echo",),
    "client": (ROOT / "client/expertd_client",),
    "expertctl": (ROOT / "client/expertctl",),
    "docs": (ROOT / "docs",),
}


@pytest.mark.parametrize("package", SOURCES)
def test_tests_lie_where_their_sources_do(package):
    """A reader who looks at ROOM/x.py finds its tests in tests/PACKAGE/ROOM; those of several rooms lie in tests/rpc,
    tests/faults or tests/gpu."""
    folders = {p.parent.relative_to(ROOT / "tests" / package) for p in (ROOT / "tests" / package).rglob("test_*.py")}
    assert folders
    for folder in folders:
        there = [base / folder for base in SOURCES[package]]
        assert any(f.is_dir() for f in there), f"tests/{package}/{folder}: there is no {there[0].relative_to(ROOT)}"
