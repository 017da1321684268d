"""The ready endpoints of a Kubernetes service, from its EndpointSlices (extra `kubernetes`, the official client).

A pod that is told to end is unready in its slice before it stops, and a new one appears when its readiness probe
passes: calls follow both as soon as the API server says so.

It needs `list` and `watch` of endpointslices in group discovery.k8s.io.
"""

from __future__ import annotations

import itertools
from typing import Any

from expertd.errors import PlacementError

__all__ = ["EndpointSlices"]

WATCH_S = 1
"""Whole seconds that one watch waits for a change: so long may the end of a client take."""


class EndpointSlices:
    """service: its name; port: name of a port of it, None = the only one; api: a kubernetes.client.DiscoveryV1Api,
    None = of the pod's service account, or else of the kubeconfig."""

    every_s = 0.05

    def __init__(self, service: str, namespace: str = "default", port: str | None = None, api: Any = None) -> None:
        """Raises PlacementError where the package or the configuration is missing."""
        self._service, self._namespace, self._port = service, namespace, port
        self._api = _api() if api is None else api
        self._slices: dict[str, Any] = {}
        self._version: str | None = None

    def read(self) -> tuple[str, ...]:
        """The addresses now; after the first time, at the next change or after WATCH_S."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            if self._version is None:
                self._list()
            else:
                self._watch()
        except ApiException as error:
            again, self._version = self._version is not None, None  # 410: what it knew is too old; otherwise it may be
            if error.status != 410 or not again:
                raise self._unread(f"{error.status} {error.reason}") from None
            return self.read()  # a list, which is not tried twice
        except HTTPError as error:
            raise self._unread(type(error).__name__) from error
        return self._addresses()

    def _list(self) -> None:
        found = self._api.list_namespaced_endpoint_slice(
            self._namespace, label_selector=self._selector, _request_timeout=10
        )
        self._slices = {piece.metadata.name: piece for piece in found.items}
        self._version = found.metadata.resource_version

    def _watch(self) -> None:
        from kubernetes.watch import Watch

        watch: Any = Watch()
        for event in watch.stream(
            self._api.list_namespaced_endpoint_slice,
            self._namespace,
            label_selector=self._selector,
            resource_version=self._version,
            timeout_seconds=WATCH_S,
            allow_watch_bookmarks=True,
            _request_timeout=(10, WATCH_S + 5),
        ):
            self._version = event["raw_object"]["metadata"]["resourceVersion"]
            piece = event["object"]
            if event["type"] == "DELETED":
                self._slices.pop(piece.metadata.name, None)
            elif event["type"] in ("ADDED", "MODIFIED"):
                self._slices[piece.metadata.name] = piece
            if event["type"] != "BOOKMARK":
                watch.stop()

    @property
    def _selector(self) -> str:
        return f"kubernetes.io/service-name={self._service}"

    def _addresses(self) -> tuple[str, ...]:
        found = itertools.chain.from_iterable(self._of(piece) for piece in self._slices.values())
        return tuple(sorted(set(found)))

    def _of(self, piece: Any) -> list[str]:
        ports = [p for p in piece.ports or [] if p.port and (self._port is None or p.name == self._port)]
        ready = [e for e in piece.endpoints or [] if e.conditions is None or e.conditions.ready is not False]
        hosts = [address for endpoint in ready for address in endpoint.addresses]
        if hosts and len(ports) != 1:
            names = [p.name for p in piece.ports or []]
            raise PlacementError.about(
                f"service {self._namespace}/{self._service}: ports",
                got=names,
                want="one" if self._port is None else repr(self._port),
                remedy="name one with port=",
            )
        return [f"[{host}]:{ports[0].port}" if ":" in host else f"{host}:{ports[0].port}" for host in hosts]

    def _unread(self, why: str) -> PlacementError:
        return PlacementError.about(
            f"EndpointSlices of {self._namespace}/{self._service}",
            got=why,
            want="them",
            remedy="the service account needs list and watch of endpointslices in discovery.k8s.io",
        )


def _api() -> Any:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise PlacementError.about(
            "EndpointSlices", got=str(error), want="the package", remedy="pip install 'kubernetes>=31'"
        ) from None
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            config.load_kube_config()
        except config.ConfigException as error:
            raise PlacementError.about("Kubernetes", got=str(error), want="a service account or a kubeconfig") from None
    return client.DiscoveryV1Api()
