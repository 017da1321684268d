"""The control plane that vLLM's trainer engines call, for servers of expertd.

vLLM 0.33 hands a trainer's weights over by four methods with plain dicts (VLLMWeightSyncClient, a structural protocol):

    sync = WeightSync(Updater(servers))
    sync.init_weight_transfer_engine({})
    sync.start_weight_update()
    sync.update_weights({"weights": [(name, tensor), ...]})     any number of times
    sync.finish_weight_update()

There is no second data plane: tensors are in the dict, and travel from here.  What vLLM's own engines put there instead
(names and shapes of tensors that are broadcast by NCCL, handles of CUDA IPC) is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from expertd.errors import MalformedMessageError
from expertd_client.weights.updater import Update, Updater

__all__ = ["WeightSync"]


class WeightSync:
    """next_version: number of the next update, 0 = one above the highest of all servers; from one thread."""

    def __init__(self, updater: Updater, next_version: int = 0) -> None:
        self.next_version = next_version
        self._updater = updater
        self._update: Update | None = None

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Whether every server can be reached and has room.  init_info: nothing of it is needed."""
        self._updater.versions()
        self._updater.plan()

    def start_weight_update(self) -> None:
        """One that is under way here is let go of: its trainer began again."""
        if self._update is not None:
            self._update.abort()
        self._update = self._updater.begin(self.next_version)

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """update_info: "weights", (name, tensor) pairs or a dict.  Raises MalformedMessageError for anything else."""
        update = self._under_way("update_weights")
        weights = update_info.get("weights")
        if not isinstance(weights, Iterable):
            raise MalformedMessageError.about(
                "update_weights",
                got=f"a dict of {', '.join(map(str, update_info)) or 'nothing'}",
                want='"weights", (name, tensor) pairs',
                remedy="tensors travel with the call: there is no group to broadcast them to",
            )
        try:
            update.put_all(weights)
        except BaseException:
            self._give_up()
            raise

    def finish_weight_update(self) -> None:
        """Every server serves the new version.  Raises UpdateFailedError, and then none does."""
        update = self._under_way("finish_weight_update")
        try:
            update.prepare()
        except BaseException:
            self._give_up()
            raise
        self._update = None
        update.commit()
        self.next_version = 0

    def _under_way(self, what: str) -> Update:
        if self._update is None:
            raise MalformedMessageError.about(what, got="no update under way", want="start_weight_update() before")
        return self._update

    def _give_up(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.abort()
