"""The versions of transformers that the adapter was tried with.  Nothing that it uses differs between them, so that
there is no module for each, only what is recorded."""

from __future__ import annotations

from expertd_client.engines.versions import Adapter

__all__ = ["ADAPTER"]

ADAPTER = Adapter(package="transformers", home="expertd_client.transformers", tried=("5.24.0", "5.23.0", "5.22.2"))
