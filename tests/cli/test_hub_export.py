"""`agl models export --to hub:OWNER/NAME` against a stand-in for a model hub: its API for a repository, and for a commit."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from test_models_commands import saved

from agentlightning.analysis.model_card import model_card
from agentlightning.errors import InputError, StoreError
from agentlightning.records import Metric
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.model_weights import push_folder

CONFIG = {
    "trainer": {"steps": 20, "seed": 3},
    "data": {"train": "/home/someone/tasks.jsonl", "val": "hub:owner/tasks"},
    "agent": {"run": "/home/someone/agent.py"},
    "algorithm": {"type": "sft"},
}


class StandIn(ThreadingHTTPServer):
    """Takes every file of a commit within it; a name that begins with `taken` belongs to somebody else."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        if "/taken/" in self.path:
            self._answer({"error": "no such repository"}, 404)
        else:
            self._answer({"sha": "0" * 40, "id": "owner/name", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            taken = self.server.created[-1]["organization"] == "taken"
            self._answer(
                {"error": "this name is taken"} if taken else {"url": f"{self.server.url}/owner/name"},
                403 if taken else 200,
            )
        elif "/preupload/" in self.path:
            files = [one["path"] for one in json.loads(body)["files"]]
            self._answer({"files": [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in files]})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"commitUrl": f"{self.server.url}/owner/name/commit/{'1' * 40}", "commitOid": "1" * 40})

    def _answer(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[StandIn]:
    with StandIn() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def registered(store: LightningStore, folder: Path) -> ModelVersion:
    await store.create_run("r", CONFIG, "r")
    for step, reward in ((0, 0.25), (20, 0.75)):
        await store.log_metrics(
            [
                Metric(step=step, name="eval/greedy/reward_mean", value=reward, run_id="r"),
                Metric(step=step, name="eval/greedy/reward_stderr", value=0.01, run_id="r"),
                Metric(step=step, name="cost/sampled_tokens", value=1000.0, run_id="r"),
            ]
        )
    first = ModelVersion(
        name="support",
        number=0,
        run_id="r",
        policy="default",
        step=10,
        resource_version=10,
        parent=None,
        base_model="Owner/base-1B",
        weights=saved(folder / "step-10"),
        licence="Apache-2.0",
    )
    await store.register_model(first)
    second = ModelVersion(
        name="support",
        number=0,
        run_id="r",
        policy="default",
        step=20,
        resource_version=20,
        parent="support@10",
        base_model="support@10",
        weights=saved(folder / "step-20"),
        data_hash="d1ce",
        metrics={"eval/greedy/reward": {"mean": 0.75, "low": 0.7, "high": 0.8, "n": 300}},
        licence="my own | `licence`\n---",
    )
    return await store.register_model(second)


async def test_a_card_says_what_the_record_knows_and_nothing_of_this_host(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        version = await registered(store, tmp_path)
        card = await model_card(store, version)
        first = await model_card(store, (await store.models("support"))[0], adapter=True)
    front, _, text = card.removeprefix("---\n").partition("\n---\n")
    assert "base_model: Owner/base-1B" in front.splitlines()
    assert front.splitlines()[-2:] == ["license: other", 'license_name: "my own | `licence`\\\\n---"']
    assert "Made from `Owner/base-1B`" in text
    assert "| `eval/greedy/reward` | 0.750 | 0.700 to 0.800 | 300 |" in text
    assert "| 0 | 0.250 ± 0.020 |  |\n| 20 | 0.750 ± 0.020 |  |" in text
    assert "| tasks | `d1ce` |" in text
    assert "2,000 sampled tokens" in text
    assert "| `trainer.seed` | `3` |" in text
    assert "| `data.train` | `tasks.jsonl` |" in text
    assert "someone" not in card
    assert "license: apache-2.0" in first
    assert "library_name: peft" in first
    assert "A low-rank adapter for `Owner/base-1B`" in first
    assert "No held-out evaluation was recorded." in first


def test_a_folder_is_pushed_whole_to_a_private_repository(hub: StandIn, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# card")
    assert push_folder(tmp_path, "owner/name", hub.url).endswith(f"/owner/name/commit/{'1' * 40}")
    (made,) = hub.created
    assert (made["name"], made["organization"]) == ("name", "owner")
    assert made.get("private") is True or made.get("visibility") == "private"  # by the version of huggingface_hub
    assert hub.files == {"config.json": b"{}", "README.md": b"# card"}


def test_a_hub_that_refuses_is_one_sentence(hub: StandIn, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"hub:taken/name: .*403"):
        push_folder(tmp_path, "taken/name", hub.url)
    with pytest.raises(InputError, match="--to: expected hub:OWNER/NAME, got 'name'"):
        push_folder(tmp_path, "name", hub.url)


def test_the_command_exports_with_a_card(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_models_commands import refused, said

    from agentlightning.store.sql.store import SqlLightningStore

    url = f"sqlite:///{tmp_path / 'agl.db'}"

    async def fill() -> None:
        async with SqlLightningStore(url) as store:
            await registered(store, tmp_path)

    asyncio.run(fill())
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert said(url, "export", "support@20", "--to", "hub:owner/name").startswith("support@20: http://127.0.0.1")
    assert sorted(hub.files) == ["README.md", "config.json", "model.safetensors"]
    assert b"# support, version 20" in hub.files["README.md"]
    assert "expected NAME@VERSION" in refused(InputError, url, "export", "r", "--to", "hub:owner/name")
