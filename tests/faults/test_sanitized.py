"""The C++ of shared memory, TCP, the engine and clusters under sanitizers, driven by their tests: `make soak`."""

from __future__ import annotations

import shutil

import plant
import pytest
import sanitized

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

STRESS = {
    "shm": ("tests/proto/shm/test_shm.py", "tests/server/transports/test_shm_hostile.py"),
    "engine": (
        "tests/server/engine/test_core.py",
        "tests/server/engine/test_core_queue.py",
        "tests/server/engine/test_core_sessions.py",
        "tests/server/engine/test_device_calls.py",
        "tests/server/engine/test_engine_faults.py",
    ),
    "tcp": (
        "tests/server/transports/test_tcp.py",
        "tests/server/transports/test_tcp_frames.py",
        "tests/server/transports/test_tcp_hostile.py",
        "tests/server/transports/test_tcp_stop.py",
        "tests/client/transports/tcp/test_connection.py",
    ),
    "cluster": (
        "tests/client/cluster/test_direct_faults.py",
        "tests/client/cluster/test_fast_call.py",
        "tests/client/cluster/test_join.py",
        "tests/client/cluster/test_split.py",
    ),
}


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def instrumented(request, tmp_path_factory):
    """(sanitizer, folder of a copy of the tree): what is compiled in one test is there for the next."""
    root = tmp_path_factory.mktemp("sanitized")
    plant.copied(root)
    yield request.param, root
    shutil.rmtree(root)


@pytest.mark.parametrize("area", STRESS)
def test_stress_tests_are_clean(instrumented, area):
    sanitizer, root = instrumented
    try:
        code, output = sanitized.sanitized(sanitizer, STRESS[area], root)
    except sanitized.SanitizerMissingError as e:
        pytest.skip(str(e))
    assert code == 0, output[-6000:]
    assert " passed" in output


FAULTS = {
    "address,undefined": ("tickets_(new T[entries])", "tickets_(new T[entries - 1])", "AddressSanitizer"),
    "thread": ("lock(holding);\n    way().give_back(t);", "lock(listing_);\n    way().give_back(t);", "data race"),
}
"""What the sanitizer has to notice: an element too few; another lock than everybody else takes."""


def test_a_mistake_is_noticed(instrumented):
    sanitizer, root = instrumented
    path = root / "proto/expertd/shm/csrc/tickets.h"
    sound, (before, after, says) = path.read_text(), FAULTS[sanitizer]
    assert sound.count(before) == 1
    plant.put(path, sound.replace(before, after))
    threads = "tests/proto/shm/test_shm.py::test_threads_share_a_session_and_each_gets_its_own_answer"
    try:
        code, output = sanitized.sanitized(sanitizer, [threads], root)
    except sanitized.SanitizerMissingError as e:
        pytest.skip(str(e))
    finally:
        plant.put(path, sound)
    assert code != 0
    assert says in output, output[-3000:]
