"""Servers for updates of their weights, and the checkpoint that they start with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trained
from updating import Server

from expertd_server.config.serve import ServeConfig


@pytest.fixture
def serve() -> Iterator[Callable[[ServeConfig], Server]]:
    """serve(config): a server; all are closed in the end."""
    with ExitStack() as stack:
        yield lambda config: Server(stack, config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of the weights of step 1."""
    return trained.saved(tmp_path / "step-1", trained.step(1))
