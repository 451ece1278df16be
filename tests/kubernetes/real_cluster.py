"""Kubernetes' own API server, controllers and scheduler as processes, and a node whose kubelet only has logs."""

import asyncio
import contextlib
import http.server
import json
import os
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import httpx
from cluster_lab import DEADLINE_S, until

from agentlightning.kubernetes.cluster import Cluster
from agentlightning.kubernetes.lightkube_cluster import LightkubeCluster
from agentlightning.records import JSON

BINARIES = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentlightning" / "kubernetes-1.20.2" / "bin"
)
NAMESPACE = "agents"
NODE = "node0"
CONTROLLERS = "job,garbagecollector,namespace,resourcequota,ttl-after-finished"
RIGHTS = [
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get", "list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "get"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
]
"""Of the worker's account, as `agl deploy kubernetes` writes them (tests/deploy compares the two)."""


class RealLab:
    """A cluster of one node that a test plays; the runner's account has its least rights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pending_s = 10.0
        self.worker_kubeconfig = folder / "runner.json"
        self._etcd_port, self._api_port, peer_port = _ports(3)
        self._logs: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "tokens.csv").write_text('admin-token,admin,1,"system:masters"\nrunner-token,runner,2\n')
        for name in ("sa.key", "kubelet.key"):
            _openssl("genrsa", "-out", folder / name, "2048")
        _openssl(
            "req",
            "-x509",
            "-key",
            folder / "kubelet.key",
            "-out",
            folder / "kubelet.crt",
            "-subj",
            "/CN=node0",
            "-days",
            "9",
        )
        for user in ("admin", "runner"):
            (folder / f"{user}.json").write_text(json.dumps(self._kubeconfig(user)))
        self._kubelet_port = self._start_kubelet()
        urls = [f"http://127.0.0.1:{port}" for port in (self._etcd_port, peer_port)]
        self._run(
            "etcd", "--data-dir", folder / "etcd", "--listen-client-urls", urls[0], "--advertise-client-urls", urls[0],
            "--listen-peer-urls", urls[1], "--log-level", "error",
        )  # fmt: skip
        self._start_api()
        self._admin = httpx.Client(
            base_url=self._url, headers={"Authorization": "Bearer admin-token"}, verify=False, timeout=30
        )
        self._await_api()  # they end where it does not answer soon
        config = ("--kubeconfig", folder / "admin.json")
        self._run(
            "kube-controller-manager",
            *config,
            f"--controllers={CONTROLLERS}",
            *_unserved(),
            "--leader-elect=false",
            "--feature-gates=TTLAfterFinished=true",
        )
        self._run("kube-scheduler", *config, *_unserved(), "--leader-elect=false")
        self._prepare()
        self._closed = threading.Event()
        threading.Thread(target=self._end_pods, daemon=True).start()
        self.cluster: Cluster
        self.workers: Cluster

    # --- the lab ---------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        self.cluster = LightkubeCluster(NAMESPACE, kubeconfig=self._folder / "admin.json")
        self.workers = LightkubeCluster(NAMESPACE, kubeconfig=self.worker_kubeconfig)

    async def end(self) -> None:
        await self.come_back()
        await self.cluster.close()
        await self.workers.close()
        for path in (
            "apis/batch/v1/namespaces/agents/jobs",
            "api/v1/namespaces/agents/pods",
            "api/v1/namespaces/agents/secrets",
            "api/v1/namespaces/agents/resourcequotas",
        ):
            self._admin.delete(
                f"/{path}", params={"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
            ).raise_for_status()
        while any(self._admin.get(f"/api/v1/namespaces/agents/{kind}").json()["items"] for kind in ("pods", "secrets")):
            for pod in self._admin.get("/api/v1/namespaces/agents/pods").json()["items"]:
                self._delete_pod(pod["metadata"]["name"])
            await asyncio.sleep(0.1)

    async def report(self, pod: str, status: JSON) -> None:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/status"
        headers = {"Content-Type": "application/merge-patch+json"}
        body = json.dumps({"status": {"conditions": None, **status} if "conditions" in status else status})
        await until(lambda: self._has(path, "spec", "nodeName"))
        self._admin.patch(path, content=body, headers=headers).raise_for_status()

    async def remove(self, pod: str) -> None:
        self._delete_pod(pod)

    def prints(self, pod: str, text: str) -> None:
        self._logs[pod] = text

    async def go_away(self) -> None:
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait()

    async def come_back(self) -> None:
        if "kube-apiserver" not in self._processes:
            self._start_api()
            await asyncio.to_thread(self._await_api)

    async def limit_pods(self, most: int) -> None:
        quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": str(most)}}}
        self._post(f"/api/v1/namespaces/{NAMESPACE}/resourcequotas", quota)
        await until(lambda: self._has(f"/api/v1/namespaces/{NAMESPACE}/resourcequotas/small", "status", "hard"))

    def _end_pods(self) -> None:
        """Tell, as a kubelet does, that pods which are to be deleted have ended."""
        with httpx.Client(base_url=self._url, headers=self._admin.headers, verify=False, timeout=30) as client:
            while not self._closed.wait(0.2):
                with contextlib.suppress(httpx.HTTPError):
                    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
                    for pod in client.get(path).raise_for_status().json()["items"]:
                        if "deletionTimestamp" in pod["metadata"]:
                            client.delete(f"{path}/{pod['metadata']['name']}", params={"gracePeriodSeconds": 0})

    def close(self) -> None:
        self._closed.set()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._kubelet.shutdown()
        self._kubelet.server_close()
        self._admin.close()

    # --- processes ---------------------------------------------------------------------------------------------------

    @property
    def _url(self) -> str:
        return f"https://127.0.0.1:{self._api_port}"

    def _run(self, program: str, *arguments: object) -> None:
        with (self._folder / f"{program}.log").open("ab") as log:
            words = [str(BINARIES / program), *map(str, arguments)]
            self._processes[program] = subprocess.Popen(words, stdout=log, stderr=log)

    def _start_api(self) -> None:
        folder, key = self._folder, self._folder / "sa.key"
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            *("--bind-address=127.0.0.1", f"--secure-port={self._api_port}", f"--cert-dir={folder}/certs"),
            *(f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC"),
            *("--service-account-issuer=https://cluster", f"--service-account-signing-key-file={key}"),
            *(f"--service-account-key-file={key}", "--service-cluster-ip-range=10.96.0.0/24"),
            *("--endpoint-reconciler-type=none", "--disable-admission-plugins=ServiceAccount"),
            *("--feature-gates=TTLAfterFinished=true", "--kubelet-preferred-address-types=InternalIP"),
        )

    def _await_api(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self._admin.get("/readyz").status_code == 200:
                    return
            assert time.monotonic() < deadline, (self._folder / "kube-apiserver.log").read_text()[-3000:]
            time.sleep(0.1)

    def _start_kubelet(self) -> int:
        logs = self._logs

        class Logs(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urllib.parse.urlsplit(self.path)
                lines = int(urllib.parse.parse_qs(parts.query)["tailLines"][0])
                text = "".join(logs.get(parts.path.split("/")[3], "").splitlines(keepends=True)[-lines:]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        self._kubelet = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Logs)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / "kubelet.crt", self._folder / "kubelet.key")
        self._kubelet.socket = context.wrap_socket(self._kubelet.socket, server_side=True)
        threading.Thread(target=self._kubelet.serve_forever, daemon=True).start()
        return int(self._kubelet.server_address[1])

    def _kubeconfig(self, user: str) -> JSON:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": self._url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": f"{user}-token"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": NAMESPACE}}],
        }

    # --- what is in the cluster --------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
        self._post(f"{roles}/roles", {"metadata": {"name": "runner"}, "rules": RIGHTS})
        subject = {"kind": "User", "name": "runner", "apiGroup": "rbac.authorization.k8s.io"}
        role = {"kind": "Role", "name": "runner", "apiGroup": "rbac.authorization.k8s.io"}
        self._post(f"{roles}/rolebindings", {"metadata": {"name": "runner"}, "subjects": [subject], "roleRef": role})
        self._post("/api/v1/nodes", {"metadata": {"name": NODE}})
        room = {"cpu": "64", "memory": "64Gi", "pods": "110"}
        status = {
            "capacity": room,
            "allocatable": room,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Played", "message": ""}],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._kubelet_port}},
        }
        headers = {"Content-Type": "application/merge-patch+json"}
        for path, change in (
            (f"/api/v1/nodes/{NODE}/status", {"status": status}),
            (f"/api/v1/nodes/{NODE}", {"spec": {"taints": []}}),
        ):
            self._admin.patch(path, content=json.dumps(change), headers=headers).raise_for_status()

    async def _has(self, path: str, *names: str) -> bool:
        found = self._admin.get(path).raise_for_status().json()
        return names[1] in found.get(names[0], {})

    def _post(self, path: str, body: JSON) -> None:
        self._admin.post(path, json=body).raise_for_status()

    def _delete_pod(self, pod: str) -> None:
        self._admin.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}", params={"gracePeriodSeconds": 0})


def _ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _unserved() -> tuple[str, ...]:
    return "--port=0", "--secure-port=0"


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
