"""Each version of an engine: what its source has is what is recorded, and our adapter fits what is recorded.

The sources of SGLang and transformers are fetched by `make vendor`; vLLM's wheels have 0.5 GB each, so that
`make engines` fetches them, and the comparison of its recorded signatures with its source is skipped without it.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import warnings
from pathlib import Path

import pytest
import signatures
from fetch_engines import pinned

from expertd.errors import UnsupportedCombinationError
from expertd_client.engines import versions
from expertd_client.engines.signatures import Sources, differences

ROOT = Path(__file__).parents[2]
PACKAGES = ("vllm", "sglang", "transformers")
CASES = [(package, version) for package in PACKAGES for version in signatures.adapter(package).tried]


def files(package, version):
    """The adapter's sources with the module of one version."""
    adapter = signatures.adapter(package)
    folder = adapter.folder.parent
    return [*folder.glob("*.py"), *adapter.folder.glob(f"v{version.replace('.', '_')}.py")]


def imports(package, tree):
    """name here -> "module:name" of an engine; and of `import ENGINE` what is read of it, "ENGINE.name"."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == package:
            found[f"{package}.{node.attr}"] = f"{package}:{node.attr}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            found |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    return found


def parameters(text, method):
    """inspect's signature of recorded parameters.  method: less the first."""
    arguments = ast.parse(f"def f{text}: 0").body[0].args
    kinds = inspect.Parameter
    made = [(a, kinds.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    made += [(a, kinds.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    bare = len(made) - len(arguments.defaults)
    found = [kinds(a.arg, k, default=kinds.empty if n < bare else None) for n, (a, k) in enumerate(made)]
    found += [kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL)] if arguments.vararg else []
    found += [
        kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if d is None else None)
        for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    found += [kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD)] if arguments.kwarg else []
    return inspect.Signature(found[1:] if method else found)


@pytest.mark.parametrize(("package", "version"), CASES)
def test_the_source_has_what_is_recorded(package, version):
    site = pinned()[package, version]
    if not site.is_dir():
        pytest.skip(f"{package} {version} is not fetched: `make engines`")
    recorded = signatures.adapter(package).recorded(version)
    assert signatures.record(package, version, site) == recorded  # signatures.py NAME VERSION --write


@pytest.mark.parametrize(("package", "version"), CASES)
def test_all_that_the_adapter_imports_is_recorded(package, version):
    kept = signatures.adapter(package).recorded(version)
    assert list(kept) == signatures.names(package, version)
    used = set()
    for path in files(package, version):
        tree = ast.parse(path.read_text())
        used |= set(imports(package, tree).values())
    assert used, package
    assert not [
        name for name in used if not any(key == name or key.startswith((f"{name}.", f"{name}[")) for key in kept)
    ]


@pytest.mark.parametrize(("package", "version"), CASES)
def test_every_call_of_the_adapter_fits_what_is_recorded(package, version):
    kept, checked = signatures.adapter(package).recorded(version), 0
    for path in files(package, version):
        tree = ast.parse(path.read_text())
        names = imports(package, tree)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            first = next((name for name in names if called == name or called.startswith(f"{name}.")), "")
            rest = called.removeprefix(first)
            text = kept.get(names.get(first, "") + rest)
            starred = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
            if isinstance(text, str) and text.startswith("(") and not starred:
                given = dict.fromkeys(k.arg for k in call.keywords)
                parameters(text, method=bool(rest)).bind(*call.args, **given)
                checked += 1
    assert checked >= (1 if package == "transformers" else 5)


def overrides(package, version):
    """Recorded name -> our function, as ast has it, which the engine calls in place of its own."""
    kept, found = signatures.adapter(package).recorded(version), {}
    for path in files(package, version):
        tree = ast.parse(path.read_text())
        names = imports(package, tree)
        classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for node in classes.values():
            bases = [ast.unparse(base) for base in node.bases]
            bodies = [node.body, *(classes[base].body for base in bases if base in classes)]
            for base in (names[base] for base in bases if base in names):
                for function in (n for body in bodies for n in body if isinstance(n, ast.FunctionDef)):
                    if f"{base}.{function.name}" in kept:
                        found[f"{base}.{function.name}"] = function
    return found


@pytest.mark.parametrize(("package", "version"), [case for case in CASES if case[0] != "transformers"])
def test_every_override_takes_what_the_engine_passes(package, version):
    adapter = signatures.adapter(package)
    kept, found = adapter.recorded(version), overrides(package, version)
    assert set(found) == set(adapter.overridden)
    for name, function in found.items():
        if kept[name] == "property":
            assert "property" in [ast.unparse(d) for d in function.decorator_list], name
            continue
        ours = parameters(f"({ast.unparse(function.args)})", method=True)
        every = list(parameters(kept[name], method=True).parameters.values())
        theirs = [p for p in every if p.kind != p.VAR_KEYWORD]
        bind = ours.bind if len(theirs) == len(every) else ours.bind_partial  # ours may want one of their **extra
        bind(*[p.name for p in theirs if p.kind != p.KEYWORD_ONLY])
        if not any(p.kind == p.VAR_POSITIONAL for p in ours.parameters.values()):
            bind(**{p.name: None for p in theirs})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
@pytest.mark.parametrize("package", PACKAGES)
def test_the_extra_allows_the_tried_versions_and_the_entry_point_is_there(package):
    import tomllib
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pin] = [r for r in map(Requirement, project["optional-dependencies"][package]) if r.name == package]
    assert all(version in pin.specifier for version in signatures.adapter(package).tried)
    for group, named in project["entry-points"].items():
        if group.startswith(package):
            module, _, function = named["expertd"].partition(":")
            path = ROOT / "client" / Path(*module.split(".")) / "__init__.py"
            assert f"def {function}() -> None:" in path.read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_version_has_a_record_a_module_where_something_differs_and_a_wheel(package):
    adapter = signatures.adapter(package)
    stems = {f"v{version.replace('.', '_')}" for version in adapter.tried}
    assert {path.stem for path in adapter.folder.glob("v*.json")} == stems
    assert {path.stem for path in adapter.folder.glob("v*.py")} == (set() if package == "transformers" else stems)
    assert {version for name, version in pinned() if name == package} == set(adapter.tried)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """An engine of two versions, and which of them, or another one, is installed."""
    (tmp_path / "home/versions").mkdir(parents=True)
    for stem, text in (("v2_0_0", "(a, b=1)"), ("v1_0_0", "(a)")):
        (tmp_path / f"home/versions/{stem}.json").write_text(json.dumps({"engine.layer:make": text}))

    class Adapter(versions.Adapter):
        folder = tmp_path / "home/versions"

        def module(self, version):
            return version

    def install(version, source):
        (tmp_path / "engine").mkdir(exist_ok=True)
        (tmp_path / "engine/__init__.py").write_text("")
        (tmp_path / "engine/layer.py").write_text(source)
        monkeypatch.setattr(versions, "_installed", lambda package: (version, tmp_path))
        return Adapter("engine", "home", ("2.0.0", "1.0.0"))

    return install


def test_a_version_that_was_tried_is_taken_without_a_look_at_its_source(engine):
    assert engine("1.0.0", "").installed() == "1.0.0"


@pytest.mark.parametrize(("source", "taken"), [("def make(a, b=1, c=2): ...", "2.0.0"), ("def make(a): ...", "1.0.0")])
def test_another_version_is_taken_with_a_warning_where_signatures_hold(engine, source, taken):
    with pytest.warns(UserWarning, match=rf"engine 3\.0\.0: .* only with 2\.0\.0, 1\.0\.0\. .* as in {taken}"):
        assert engine("3.0.0", source).installed() == taken


@pytest.mark.parametrize(
    ("source", "said"), [("def make(b): ...", r"make is \(b\), was \(a, b=1\)"), ("", "make is not defined")]
)
def test_another_version_is_refused_with_the_list_where_they_do_not(engine, source, said):
    with warnings.catch_warnings(), pytest.raises(UnsupportedCombinationError, match=said) as error:
        engine("3.0.0", source).installed()
    assert "want one of 2.0.0, 1.0.0; pip install 'engine==2.0.0'" in str(error.value)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_change_in_the_source_is_seen(package, tmp_path):
    """Of each recorded name: as if the newest version did not have it."""
    adapter = signatures.adapter(package)
    recorded = adapter.recorded(adapter.tried[0])
    for name in recorded:
        assert differences(recorded, {**recorded, name: None}, adapter.overridden)
    assert not differences(recorded, recorded, adapter.overridden)
    assert adapter.choose("99.0", tmp_path) is None  # there is no source at all
    assert Sources(tmp_path).signatures(recorded) == dict.fromkeys(recorded)
