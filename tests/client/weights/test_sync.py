"""vLLM's weight-sync client, by its four methods."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import pytest
import trained
from updating import Server

from expertd.errors import ExpertdError, MalformedMessageError
from expertd_client.weights import UpdateFailedError, Updater, WeightSync

pytestmark = pytest.mark.timeout(120)


@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    """As vLLM 0.33 has it in vllm/distributed/weight_transfer/base.py."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self) -> None: ...


@pytest.fixture
def sync(tmp_path):
    with ExitStack() as stack:
        server = Server(stack, trained.config(trained.saved(tmp_path / "1", trained.step(1))))
        made = WeightSync(stack.enter_context(Updater(server.host.address)), next_version=5)
        made.server = server
        yield made


def test_a_version_by_the_four_methods(sync):
    assert isinstance(sync, VLLMWeightSyncClient)
    first, tensors = sync.server.answers(), list(trained.step(2).items())
    sync.init_weight_transfer_engine({"rank": 0})
    for number in (5, 6):
        sync.start_weight_update()
        sync.update_weights({"weights": tensors[:10]})
        sync.update_weights({"weights": dict(tensors[10:])})
        assert number == 6 or sync.server.answers() == first
        sync.finish_weight_update()
        assert sync.server.client.describe().versions[0].number == number
    assert sync.server.answers() != first


def test_what_another_engine_sends_is_refused(sync):
    with pytest.raises(MalformedMessageError, match="got no update under way"):
        sync.update_weights({"weights": []})
    sync.start_weight_update()
    with pytest.raises(MalformedMessageError, match="got a dict of names, dtype_names"):
        sync.update_weights({"names": ["a"], "dtype_names": ["bfloat16"]})
    sync.update_weights({"weights": list(trained.step(2).items())[:3]})
    with pytest.raises(UpdateFailedError, match=r"is missing|was put"):
        sync.finish_weight_update()
    assert sync.server.call("GetUpdate").update == ""
    with pytest.raises(MalformedMessageError):
        sync.finish_weight_update()


def test_a_trainer_that_begins_again_lets_go_of_what_it_had_begun(sync):
    sync.start_weight_update()
    sync.update_weights({"weights": list(trained.step(2).items())[:3]})
    sync.start_weight_update()
    sync.update_weights({"weights": trained.step(3)})
    sync.finish_weight_update()
    assert [v.number for v in sync.server.client.describe().versions] == [5, 1]


def test_a_server_that_is_gone_is_said_at_once(sync):
    sync.server.host.close()
    with pytest.raises(ExpertdError):
        sync.init_weight_transfer_engine({})
