"""Whether the core is built here, for the tests that cannot do without."""

import pytest

from expertd_server.engine.core import CoreMissingError, library


def _missing() -> str:
    try:
        library()
    except CoreMissingError as e:
        return str(e)
    return ""


MISSING = _missing()
needs_core = pytest.mark.skipif(bool(MISSING), reason=MISSING or "built")
