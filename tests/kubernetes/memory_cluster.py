"""A cluster in memory: the Cluster that the runner drives, with the few of Kubernetes' controllers that its tests need."""

import asyncio
import copy
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence

from agentlightning.kubernetes.cluster import Cluster, ClusterError, Kind
from agentlightning.records import JSON

CREATED = "2026-11-27T07:00:00Z"


class MemoryCluster(Cluster):
    """Jobs get a pod at once, where the quota allows it; what is reported of pods is a test's affair."""

    def __init__(self) -> None:
        self.objects: dict[Kind, dict[str, JSON]] = {"Job": {}, "Pod": {}, "Secret": {}, "Event": {}}
        self.logs: dict[str, str] = {}
        self.away = False
        self.max_pods: int | None = None
        self._watches: set[tuple[Kind, asyncio.Queue[tuple[str, JSON] | None]]] = set()

    def lie_down(self) -> None:
        """The API server ends, with all that is asked of it."""
        self.away = True
        for _, queue in self._watches:
            queue.put_nowait(None)

    def change(self, kind: Kind, found: JSON, change: str = "MODIFIED") -> None:
        """An object is as told."""
        objects = self.objects[kind]
        if change == "DELETED":
            objects.pop(found["metadata"]["name"], None)
        else:
            objects[found["metadata"]["name"]] = found
        for followed, queue in self._watches:
            if followed == kind:
                queue.put_nowait((change, copy.deepcopy(found)))

    async def create(self, manifest: JSON, *, dry_run: bool = False) -> JSON:
        self._answer()
        kind, metadata = manifest["kind"], manifest["metadata"]
        if len(metadata["name"]) > 63 or any(len(value) > 63 for value in metadata["labels"].values()):
            raise ClusterError("Kubernetes: the name of an object or the value of a label is too long", 422)
        if kind == "Secret" and sum(map(len, manifest["data"].values())) * 3 // 4 > 1024 * 1024:
            raise ClusterError("Kubernetes: data: Too long: must have at most 1048576 bytes", 422)
        if metadata["name"] in self.objects[kind]:
            raise ClusterError(f"Kubernetes: {kind} {metadata['name']} already exists", 409)
        found = copy.deepcopy(manifest)
        found["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": CREATED}
        if kind == "Job":
            found["spec"]["template"]["spec"].pop("nosuchsetting", None)
        if not dry_run:
            self.change(kind, found, "ADDED")
            if kind == "Job":
                self._start_pod(found)
        return found

    def _start_pod(self, job: JSON) -> None:
        if self.max_pods is not None and len(self.objects["Pod"]) >= self.max_pods:
            told = f"Error creating: pods is forbidden: exceeded quota: small, limited: pods={self.max_pods}"
            about = {"kind": "Job", "name": job["metadata"]["name"]}
            event = {"type": "Warning", "reason": "FailedCreate", "message": told, "involvedObject": about}
            self.objects["Event"][job["metadata"]["name"]] = {"metadata": {"name": "event", "labels": {}}, **event}
            return
        template = job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "job-name": job["metadata"]["name"]}
        metadata = {"name": f"{job['metadata']['name']}-abcde", "uid": str(uuid.uuid4()), "labels": labels}
        self.change("Pod", {"kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": {}}, "ADDED")

    async def read(self, kind: Kind, name: str) -> JSON:
        self._answer()
        if name not in self.objects[kind]:
            raise ClusterError(f"Kubernetes: {kind} {name} not found", 404)
        return copy.deepcopy(self.objects[kind][name])

    async def list(
        self, kind: Kind, labels: Mapping[str, str], fields: Mapping[str, str] | None = None
    ) -> Sequence[JSON]:
        self._answer()
        found = [each for each in self.objects[kind].values() if labels.items() <= each["metadata"]["labels"].items()]
        name = (fields or {}).get("involvedObject.name")
        return copy.deepcopy([each for each in found if name is None or each["involvedObject"]["name"] == name])

    async def follow(self, kind: Kind, labels: Mapping[str, str]) -> AsyncGenerator[tuple[str, JSON], None]:
        queue: asyncio.Queue[tuple[str, JSON] | None] = asyncio.Queue()
        listed = await self.list(kind, labels)
        self._watches.add((kind, queue))
        try:
            for each in listed:
                yield "ADDED", each
            yield "LISTED", {}
            while (told := await queue.get()) is not None:
                if labels.items() <= told[1]["metadata"]["labels"].items():
                    yield told
        finally:
            self._watches.discard((kind, queue))
        raise ClusterError("Kubernetes' API server does not answer: connection lost")

    async def delete_job(self, name: str) -> None:
        job = await self.read("Job", name)
        self.change("Job", job, "DELETED")
        self.objects["Secret"].pop(name, None)
        for pod in list(self.objects["Pod"].values()):
            if pod["metadata"]["labels"]["job-name"] == name:
                self.change("Pod", pod, "DELETED")

    async def log(self, pod: str, container: str, lines: int) -> str:
        self._answer()
        await self.read("Pod", pod)
        return "".join(self.logs.get(pod, "").splitlines(keepends=True)[-lines:])

    async def close(self) -> None:
        self.lie_down()

    def _answer(self) -> None:
        if self.away:
            raise ClusterError("Kubernetes' API server does not answer: connection refused")
