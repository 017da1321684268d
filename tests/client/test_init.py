"""The library's public names, and what importing it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import expertd_client

ROOT = Path(__file__).parents[2]
MOST_ENTRIES = dict.fromkeys(
    ("proto/expertd", "kernels/expertd_kernels", "server/expertd_server", "client/expertd_client", "client/expertctl"),
    12,
)
MOST_MODULES = 40
OPTIONAL = {"RankExperts": "torch", "RayServers": "ray", "RemoteExperts": "torch"}
"""Public name -> the package that it needs beside those of the library."""


def modules_of(statement):
    """Our modules that a new interpreter has loaded after that."""
    ours = "[m for m in sys.modules if m.split('.')[0] in ('expertd', 'expertd_client', 'expertctl')]"
    code = f"{statement}\nimport sys\nprint(*{ours})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_library_loads_one_module():
    assert modules_of("import expertd_client") == ["expertd_client"]


def test_importing_the_client_loads_few_modules():
    loaded = modules_of("from expertd_client import ExpertClient")
    assert len(loaded) <= MOST_MODULES, loaded


def test_a_client_of_one_server_loads_neither_the_cluster_nor_tools():
    loaded = modules_of("from expertd_client import ExpertClient")
    unwanted = ("expertd_client.cluster", "expertd_client.engines", "expertd_client.device", "expertctl")
    assert not [m for m in loaded if m.startswith(unwanted)]


def test_every_public_name_is_where_type_checkers_look_for_it():
    tree = ast.parse(Path(expertd_client.__file__).read_text())
    typed = {
        alias.name: (node.module or "").removeprefix("expertd_client.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("expertd_client.")
        for alias in node.names
    }
    assert typed == expertd_client._MODULES
    assert sorted(typed) == sorted([*expertd_client.__all__, *OPTIONAL])


@pytest.mark.parametrize("name", sorted(set(expertd_client._MODULES) - {"RayServers"}))  # needs the extra `ray`
def test_a_public_name_can_be_imported(name):
    assert getattr(expertd_client, name).__name__ == name


def run_without(packages, statements):
    """What a new interpreter prints in which those packages cannot be imported."""
    code = f"import sys\nsys.modules.update(dict.fromkeys({packages!r}))\n{statements}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_all_names_can_be_imported_without_optional_packages():
    shown = "print(*(n for n in dir() if n[0] != '_'))"
    names = run_without(["ray", "torch", "kubernetes"], f"from expertd_client import *\n{shown}")
    assert {*names, *OPTIONAL} - {"sys"} == set(expertd_client._MODULES)


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_name_without_its_package_says_which_one_it_needs(name):
    tried = f"try:\n    from expertd_client import {name}\nexcept ImportError as error:\n    print(error.name)"
    assert run_without([OPTIONAL[name]], tried) == [OPTIONAL[name]]
    assert name in dir(expertd_client)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'ExpertClients'"):
        expertd_client.ExpertClients  # noqa: B018


@pytest.mark.parametrize("package", MOST_ENTRIES)
def test_a_package_has_few_entries(package):
    entries = [p.name for p in (ROOT / package).iterdir() if p.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= MOST_ENTRIES[package], sorted(entries)
