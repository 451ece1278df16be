"""Rollouts are sent to a collector while a run goes on; what it does not take never holds up the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.errors import NotFoundError
from agentlightning.records import Finish, NewRollout, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.tracing.otlp import write_response
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.senders import TraceExport


@dataclass
class Receiver:
    """A collector that takes everything, or answers with `status`; rollout ids in the order in which they came."""

    url: str = ""
    status: int = 200
    body: bytes = b""
    rollouts: list[str] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for span in message.resource_spans[0].scope_spans[0].spans:
            self.rollouts += [pair.value.string_value for pair in span.attributes if pair.key == "agl.rollout_id"]
        self.came.set()
        return web.Response(status=self.status, body=self.body, content_type="application/x-protobuf")


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/v1/traces", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield receiver
    await runner.cleanup()


async def finish(store: LightningStore, run_id: str, group: str, count: int) -> list[str]:
    """Rollouts of a group that have finished, in that order."""
    await store.enqueue([NewRollout(run_id=run_id, task={}, group_id=group, replica=n) for n in range(count)])
    claims = await store.claim(WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0), limit=count)
    await store.finish([Finish(lease=claim.lease, state="succeeded") for claim in claims])
    return [claim.rollout.id for claim in claims]


def a_folder(path: Path, run_id: str = "r") -> RunFolder:
    folder = RunFolder(path, run_id)
    folder.make()
    return folder


async def test_rollouts_are_sent_as_they_finish_and_the_last_ones_at_the_end(
    receiver: Receiver, tmp_path: Path
) -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("traced", {}, "r")).id
        notes: list[str] = []
        async with TraceExport(receiver.url, a_folder(tmp_path), store, notes.append):
            first = await finish(store, run_id, "a", 3)
            await receiver.came.wait()
            last = await finish(store, run_id, "b", 2)
        assert receiver.rollouts == first + last
        assert notes == []


async def test_a_run_that_is_resumed_goes_on_where_it_was(receiver: Receiver, tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("traced", {}, "r")).id
        sent = await finish(store, run_id, "a", 2)
        for group in ("b", "c"):
            async with TraceExport(receiver.url, a_folder(tmp_path), store, pytest.fail):
                sent += await finish(store, run_id, group, 1)
        assert receiver.rollouts == sent


async def test_a_collector_that_refuses_is_told_of_once_with_what_to_do_later(
    receiver: Receiver, tmp_path: Path
) -> None:
    receiver.status = 401
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("traced", {}, "r")).id
        notes: list[str] = []
        told = asyncio.Event()

        def tell(note: str) -> None:
            notes.append(note)
            told.set()

        async with TraceExport(receiver.url, a_folder(tmp_path), store, tell):
            await finish(store, run_id, "a", 1)
            await told.wait()
            await finish(store, run_id, "b", 1)
        [note] = notes
        assert "refuses traces with HTTP 401" in note
        assert f"agl rollouts export --as traces r --to {receiver.url}" in note
        assert len(receiver.rollouts) == 1


async def test_without_an_endpoint_nothing_is_sent_or_written(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("traced", {}, "r")).id
        folder = a_folder(tmp_path)
        async with TraceExport(None, folder, store, pytest.fail):
            await finish(store, run_id, "a", 1)
        assert not (folder.path / "traces_exported").exists()


async def test_the_command_sends_a_run_afterwards(receiver: Receiver, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    async with open_store(url) as store:
        ids = await finish(store, (await store.create_run("traced", {}, "r")).id, "a", 20)
    given = ["rollouts", "export", "r", "--as", "traces", "--store", url, "--to"]
    done = await asyncio.to_thread(CliRunner().invoke, app, [*given, receiver.url])
    assert done.output.strip() == f"20 rollouts, 20 spans: {receiver.url}"
    assert receiver.rollouts == ids
    file = tmp_path / "traces.jsonl"
    done = await asyncio.to_thread(CliRunner().invoke, app, [*given, str(file)])
    assert done.exit_code == 0, done.output
    assert len(file.read_text().splitlines()) == 2
    given[2] = "unknown"
    failed = await asyncio.to_thread(CliRunner().invoke, app, [*given, receiver.url])
    assert isinstance(failed.exception, NotFoundError)


async def test_an_export_that_cannot_note_how_far_it_came_is_told_of(receiver: Receiver, tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("traced", {}, "r")).id
        folder = a_folder(tmp_path)
        (folder.path / "traces_exported").mkdir()
        notes: list[str] = []
        async with TraceExport(receiver.url, folder, store, notes.append):
            await finish(store, run_id, "a", 1)
            await receiver.came.wait()
        [note] = notes
        assert "traces are no longer exported" in note


async def test_spans_that_a_collector_takes_and_rejects_are_told_of_once(receiver: Receiver, tmp_path: Path) -> None:
    receiver.body = write_response(1, "too old")
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("traced", {}, "r")).id
        notes: list[str] = []
        async with TraceExport(receiver.url, a_folder(tmp_path), store, notes.append):
            sent = await finish(store, run_id, "a", 17)
        assert receiver.rollouts == sent
        assert notes == [f"traces: {receiver.url} takes them and rejects some spans: too old"]
