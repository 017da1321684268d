"""A packed layer in a file."""

from pathlib import Path

import pytest
from cache_kit import Layer


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    return Layer(tmp_path)
