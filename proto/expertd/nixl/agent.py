"""One of NIXL's agents: a piece of memory that one peer may write, and writes into the peer's.  For one thread.

Without NIXL's progress thread: it spins, holding a lock that each call here needs, and where cores are few a transfer
then takes the scheduler's time slices instead of microseconds.  Whoever owns an agent looks often while something is
under way: looking is what carries transfers on, also those of the peer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from expertd.nixl.find import load

__all__ = ["Agent", "AgentError"]

_BACKEND = "UCX"


class AgentError(Exception):
    """NIXL failed; the text has its word for it."""


class Agent:
    """address, nbytes: of the memory.  metadata: what the peer needs.  Raises NixlMissingError, AgentError."""

    def __init__(self, address: int, nbytes: int) -> None:
        nixl = load()
        self._address, self._to, self._peer = address, 0, ""
        self._under_way: list[Any] = []
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        try:
            self._agent = nixl.nixl_agent(f"expertd-{secrets.token_hex(16)}", config)
            self._agent.create_backend(_BACKEND)
            self._memory = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as e:
            raise AgentError(f"NIXL: no agent with {_BACKEND}: {_word(e)}") from e

    def meet(self, metadata: bytes, address: int) -> None:
        """The peer, and where its memory lies.  Raises AgentError."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as e:
            raise AgentError(f"NIXL: the peer's metadata was not taken: {_word(e)}") from e
        self._peer, self._to = name.decode("utf-8", "replace") if isinstance(name, bytes) else name, address

    def write(self, ranges: Sequence[tuple[int, int]], note: bytes) -> None:
        """Writes these pieces of the memory (offset, bytes) to the same places of the peer's, and notifies it once they
        are there.  They must stay as they are until `under_way` is 0.  Raises AgentError."""
        try:
            if not ranges:
                self._agent.send_notif(self._peer, note)
                return
            own, other = (
                self._agent.get_xfer_descs([(base + at, n, 0) for at, n in ranges], "DRAM")
                for base in (self._address, self._to)
            )
            transfer = self._agent.initialize_xfer("WRITE", own, other, self._peer, note)
            self._settle(transfer, self._agent.transfer(transfer))
        except AgentError:
            raise
        except Exception as e:
            raise AgentError(f"NIXL: a write failed: {_word(e)}") from e

    def look(self) -> Sequence[bytes]:
        """Notifications of the peer that have come.  Raises AgentError."""
        try:
            found = self._agent.get_new_notifs()
            transfers, self._under_way = self._under_way, []
            for transfer in transfers:
                self._settle(transfer, self._agent.check_xfer_state(transfer))
        except AgentError:
            raise
        except Exception as e:
            raise AgentError(f"NIXL: a transfer failed: {_word(e)}") from e
        return found.get(self._peer, ()) if found else ()

    @property
    def under_way(self) -> int:
        """Writes that have not ended."""
        return len(self._under_way)

    def _settle(self, transfer: Any, state: str) -> None:
        if state == "PROC":
            self._under_way.append(transfer)
            return
        transfer.release()
        if state != "DONE":
            raise AgentError("NIXL: a transfer failed")


def _word(e: Exception) -> str:
    return str(e) or type(e).__name__
