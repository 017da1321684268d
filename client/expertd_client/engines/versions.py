"""Which version of an engine is installed, and which of the adapter's modules is written for it.

Each version that the adapter was tried with has a JSON file in the adapter's folder `versions` with the signatures of
what the adapter uses, and a module beside it with what differs between versions, if something does.  Another version is
taken, with a warning, where those signatures hold in its source, and refused otherwise.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from expertd.errors import UnsupportedCombinationError
from expertd_client.engines.signatures import Signature, Sources, differences

__all__ = ["Adapter", "Chosen"]


@dataclass(frozen=True)
class Chosen:
    """version: whose module is used; exact: it is the installed one; wrong: of each version that was compared, how its
    signatures differ from the installed source."""

    version: str
    exact: bool
    wrong: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Adapter:
    """An engine and the versions that its adapter was tried with.

    package      as pip and import name it
    home         the adapter's package, which has the folder `versions`
    tried        versions, newest first
    overridden   of the recorded names, those whose parameters must be exactly as recorded: the engine calls ours
    """

    package: str
    home: str
    tried: tuple[str, ...]
    overridden: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(__file__).parents[1].joinpath(*self.home.split(".")[1:], "versions")

    def recorded(self, version: str) -> dict[str, Signature]:
        """Name (as signatures.Sources takes it) -> its signature in that version."""
        found: dict[str, Signature] = json.loads((self.folder / f"{_stem(version)}.json").read_text())
        return found

    def module(self, version: str) -> ModuleType:
        """What differs: the module of one of `tried`."""
        return importlib.import_module(f"{self.home}.versions.{_stem(version)}")

    def choose(self, installed: str, site: Path) -> Chosen | None:
        """The version whose module fits `installed`, whose source is in the folder `site`; None = none fits."""
        if installed in self.tried:
            return Chosen(installed, True, {})
        sources, wrong = Sources(site), {}
        for version in self.tried:
            recorded = self.recorded(version)
            wrong[version] = differences(recorded, sources.signatures(recorded), self.overridden)
            if not wrong[version]:
                return Chosen(version, False, wrong)
        return None

    def installed(self) -> ModuleType:
        """The module for the version that is installed.  Warns and raises as check()."""
        return self.module(self.check())

    def check(self) -> str:
        """The version that the installed one is taken as.  Warns where nobody tried that one and its signatures hold;
        raises UnsupportedCombinationError where they do not."""
        version, site = _installed(self.package)
        chosen = self.choose(version, site)
        if chosen is None:
            raise self._refused(version, site)
        if not chosen.exact:
            warnings.warn(
                f"{self.package} {version}: expertd was not tried with it, only with {', '.join(self.tried)}.  What it "
                f"uses has the same signatures as in {chosen.version}, so it goes on; compare the answers of this "
                "version with a whole model's.",
                stacklevel=3,
            )
        return chosen.version

    def _refused(self, version: str, site: Path) -> UnsupportedCombinationError:
        recorded = self.recorded(self.tried[0])
        wrong = differences(recorded, Sources(site).signatures(recorded), self.overridden)
        first = "; ".join(f"{name} {how}" for name, how in list(wrong.items())[:3])
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return UnsupportedCombinationError.about(
            f"{self.package}: remote experts",
            got=f"version {version}, which differs from {self.tried[0]} in what is used: {first}{more}",
            want=f"one of {', '.join(self.tried)}",
            remedy=f"pip install '{self.package}=={self.tried[0]}'",
        )


def _stem(version: str) -> str:
    return "v" + version.replace(".", "_")


def _installed(package: str) -> tuple[str, Path]:
    """(version, the folder that holds the package)."""
    spec = importlib.util.find_spec(package)
    places: Sequence[str] = list(spec.submodule_search_locations or ()) if spec is not None else ()
    if not places:
        raise UnsupportedCombinationError.about(
            f"{package}: remote experts", got="no such package here", want=f"{package}, installed"
        )
    return importlib.metadata.version(package), Path(places[0]).parent
