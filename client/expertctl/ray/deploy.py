"""What `expertctl ray` does: up, status, down; this process is in the Ray cluster (source.connect)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError

from expertctl.ray.coordinator import Coordinator
from expertctl.ray.spec import Spec
from expertd.errors import DeadlineExceededError, PlacementError, UnavailableError
from expertd_client.cluster.ray import NAMESPACE

__all__ = ["Rows", "down", "status", "up"]

Rows = Sequence[dict[str, Any]]
"""One a server: part, replica, and what Watched.as_row says."""

_ASK_S = 30.0
_POLL_S = 0.2


def up(spec: Spec, wait_s: float, told: Callable[[Rows], None] = lambda rows: None) -> Rows:
    """Starts what is wanted, or finds it there, and waits until all of it serves; told: what is so far.

    Raises PlacementError where the name is taken by something else; UnavailableError where a server cannot serve, and
    DeadlineExceededError: what this call has started is ended again."""
    made = not _there(spec.name)
    coordinator = (
        ray.remote(Coordinator)
        .options(
            name=spec.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
        )
        .remote(spec)
    )
    found = ray.get(coordinator.spec.remote(), timeout=_ASK_S)
    if found != spec:
        raise PlacementError.about(
            f"servers {spec.name!r}",
            got=f"others under this name: {found}",
            want=str(spec),
            remedy="expertctl ray down ends them; --name gives these another name",
        )
    try:
        return _waited(coordinator, wait_s, told)
    except (UnavailableError, DeadlineExceededError):
        if made:
            down(spec.name, 0.0)
        raise


def _waited(coordinator: Any, wait_s: float, told: Callable[[Rows], None]) -> Rows:
    end_s = time.monotonic() + wait_s
    while True:
        rows: Rows = ray.get(coordinator.rows.remote(), timeout=_ASK_S)
        told(rows)
        failed = [row for row in rows if row["phase"] == "failed"]
        if failed:
            raise UnavailableError("; ".join(f"part {r['part']}, replica {r['replica']}: {r['why']}" for r in failed))
        if all(row["phase"] == "serving" for row in rows):
            return rows
        if time.monotonic() > end_s:
            late = [f"part {r['part']}, replica {r['replica']} {r['phase']}" for r in rows if r["phase"] != "serving"]
            raise DeadlineExceededError.about(
                "servers",
                got="; ".join(late),
                want=f"all to serve in {wait_s:g} s",
                remedy="`ray status` tells whether there is room",
            )
        time.sleep(_POLL_S)


def status(name: str) -> Rows:
    """Every server.  Raises UnavailableError where there are none of that name."""
    coordinator = _coordinator(name)
    try:
        rows: Rows = ray.get(coordinator.rows.remote(), timeout=_ASK_S)
    except RayError as error:
        raise UnavailableError(f"servers {name!r}: their coordinator does not answer: {type(error).__name__}") from None
    return rows


def down(name: str, grace_s: float) -> bool:
    """Ends them, what was taken is answered first.  Whether all of it was.  Raises UnavailableError."""
    coordinator = _coordinator(name)
    answered = False
    with contextlib.suppress(RayError):
        answered = bool(ray.get(coordinator.down.remote(grace_s), timeout=grace_s + _ASK_S))
    ray.kill(coordinator)
    for left in _named():  # of a coordinator that could not do it
        if left["namespace"] == NAMESPACE and left["name"].startswith(f"{name}/"):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(left["name"], namespace=NAMESPACE))
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(f"{name}/") and group["state"] != "REMOVED":
            ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
    return answered


def _there(name: str) -> bool:
    return any(a["namespace"] == NAMESPACE and a["name"] == name for a in _named())


def _named() -> list[dict[str, str]]:
    """Each named actor of the cluster: its "namespace" and "name"."""
    return cast(list[dict[str, str]], ray.util.list_named_actors(all_namespaces=True))


def _coordinator(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise UnavailableError.about(
            "Ray", got=f"no servers {name!r}", want="them", remedy="expertctl ray up starts some"
        ) from None
