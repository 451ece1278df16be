"""LightkubeCluster: a namespace of a real cluster, by lightkube; credentials are those of the pod, else of kubeconfig."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.kubernetes.cluster import ClusterError, Kind
from agentlightning.records import JSON

if TYPE_CHECKING:
    from httpx2 import Request
    from lightkube import AsyncClient

TIMEOUT_S = 10.0
PLACES: dict[Kind, tuple[str, str]] = {
    "Job": ("batch", "jobs"),
    "Pod": ("", "pods"),
    "Secret": ("", "secrets"),
    "Event": ("", "events"),
}
"""Group and plural of each kind, as URLs have them."""


class LightkubeCluster:
    """One namespace. MissingExtraError without lightkube, ConfigError where no cluster is configured."""

    def __init__(self, namespace: str | None, kubeconfig: Path | None = None) -> None:
        """namespace: None for that of the pod, or of kubeconfig's context. kubeconfig: None for the usual ones."""
        try:
            import httpx2
            import lightkube
            from lightkube.core.exceptions import ConfigError as NotConfigured
            from lightkube.generic_resource import GenericNamespacedResource, create_api_info
            from lightkube.types import CascadeType
        except ModuleNotFoundError as cause:
            raise MissingExtraError(str(cause.name), "kubernetes") from cause
        self._http = httpx2
        # Not lightkube's models, which drop what they do not know: a cluster may be newer than they are. Not its registered
        # generic ones either: that registry is the process's, and knows a name once.
        self._kinds: dict[str, Any] = {
            kind: type(kind, (GenericNamespacedResource,), {"_api_info": create_api_info(group, "v1", kind, plural)})
            for kind, (group, plural) in PLACES.items()
        }
        self._background = CascadeType.BACKGROUND
        timeout = httpx2.Timeout(TIMEOUT_S)
        try:
            config = None if kubeconfig is None else lightkube.KubeConfig.from_file(kubeconfig)
            self._client: AsyncClient = lightkube.AsyncClient(config, namespace=namespace, timeout=timeout)
            self._trial: AsyncClient = lightkube.AsyncClient(config, namespace=namespace, timeout=timeout, dry_run=True)
        except (NotConfigured, OSError) as cause:
            raise ConfigError(
                f"kubernetes: no cluster is configured here (KUBECONFIG, or a service account): {cause}"
            ) from cause
        for client in (self._client, self._trial):
            # lightkube has no setting for it, and a transport of our own would ignore the environment's proxies.
            client._client._client.event_hooks = {"request": [_close_unfinished_handshake]}

    async def create(self, manifest: JSON, *, dry_run: bool = False) -> JSON:
        client = self._trial if dry_run else self._client
        with self._told():
            return _plain(await client.create(self._kinds[manifest["kind"]].from_dict(manifest)))

    async def read(self, kind: Kind, name: str) -> JSON:
        with self._told():
            return _plain(await self._client.get(self._kinds[kind], name))

    async def list(
        self, kind: Kind, labels: Mapping[str, str], fields: Mapping[str, str] | None = None
    ) -> Sequence[JSON]:
        with self._told():
            listed = self._client.list(self._kinds[kind], labels=dict(labels), fields=dict(fields or {}))
            return [_plain(each) async for each in listed]

    async def follow(self, kind: Kind, labels: Mapping[str, str]) -> AsyncGenerator[tuple[str, JSON], None]:
        with self._told():
            listed = self._client.list(self._kinds[kind], labels=dict(labels))
            async for each in listed:
                yield "ADDED", _plain(each)
            yield "LISTED", {}
            version = listed.resourceVersion
            watch: Any = self._client.watch(self._kinds[kind], labels=dict(labels), resource_version=version)
            async with aclosing(watch) as changes:  # the one request here that is open while others go on
                async for change, each in changes:
                    yield str(change), _plain(each)

    async def delete_job(self, name: str) -> None:
        with self._told():
            await self._client.delete(self._kinds["Job"], name, cascade=self._background)

    async def log(self, pod: str, container: str, lines: int) -> str:
        with self._told():
            return "".join([line async for line in self._client.log(pod, container=container, tail_lines=lines)])

    async def close(self) -> None:
        await self._client.close()
        await self._trial.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Failures as ClusterError."""
        try:
            yield
        except self._http.HTTPStatusError as cause:  # lightkube's own, ApiError, is one
            status = getattr(cause, "status", None)
            code = getattr(status, "code", None) or (cause.response.status_code if status is None else None)
            raise ClusterError(f"Kubernetes: {cause}", code) from cause
        except self._http.HTTPError as cause:
            raise ClusterError(f"Kubernetes' API server does not answer: {cause or type(cause).__name__}") from cause


async def _close_unfinished_handshake(request: Request) -> None:
    """Have a request that is cancelled during its TLS handshake close its socket: httpcore2 (2.16) closes it where the
    handshake fails, and leaves it open where it is cancelled."""
    connected: list[Any] = []

    async def trace(event: str, details: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            connected.append(details["return_value"])
        elif event == "connection.start_tls.failed":
            await connected[-1].aclose()

    request.extensions["trace"] = trace


def _plain(found: Any) -> JSON:
    plain: JSON = found.to_dict()
    return plain
