"""Models of transformers, which wants Python 3.11."""

from __future__ import annotations

import sys

import pytest

if sys.version_info < (3, 11):
    collect_ignore_glob = ["test_*.py"]
else:
    import transformers

    @pytest.fixture(autouse=True, scope="session")
    def _quiet() -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
