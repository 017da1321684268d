"""What a scrape sees of new weights."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import trained
from updating import Server

from expertd.errors import ChangeRefusedError, ChangeUnknownError
from expertd_server.config.values import Ranges

pytestmark = pytest.mark.timeout(120)


def test_versions_by_layer_bytes_time_and_outcomes(tmp_path):
    with ExitStack() as stack:
        folder = trained.saved(tmp_path / "1", trained.step(1))
        server = Server(stack, trained.config(folder, experts=Ranges.parse("1-2")))

        def sample(name, **labels):
            return server.host.metrics.registry.get_sample_value(name, labels)

        assert [sample("expertd_weights_version", layer=str(n)) for n in (0, 1, 2)] == [1, 1, None]
        assert sample("expertd_update_bytes_total") == 0
        server.update(trained.step(2), version=7)
        assert [sample("expertd_weights_version", layer=str(n)) for n in (0, 1)] == [7, 7]
        assert sample("expertd_update_bytes_total") == 2 * 2 * 3 * trained.H * trained.I * 2
        packed = sample("expertd_update_packing_seconds_total")
        assert packed > 0
        server.call("RollbackVersion")
        assert sample("expertd_weights_version", layer="1") == 1
        server.call("BeginUpdate", update="a")
        server.call("AbortUpdate", update="a")
        server.call("BeginUpdate", update="b")
        with pytest.raises((ChangeRefusedError, ChangeUnknownError)):
            server.call("PrepareUpdate", update="b")
        names = ("committed", "rolled_back", "aborted", "failed")
        outcomes = {o: sample("expertd_updates_total", outcome=o) for o in names}
        assert outcomes == {"committed": 1, "rolled_back": 1, "aborted": 1, "failed": 1}
        assert sample("expertd_update_packing_seconds_total") == packed
        server.host.residence.remove(1)
        assert sample("expertd_weights_version", layer="1") is None
