"""Generated pages and the golden refusal matrix are what the code says today."""

from pathlib import Path

import pytest

from expertd_kernels.docs import PAGES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_generated_files_are_up_to_date(name):
    assert (ROOT / name).read_text() == PAGES[name](), f"{name} is stale: run `make docs` and read the diff"
