"""Rollouts are sent to a collector while a run goes on; what it does not take never holds up the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from loop_doubles import WORKER
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.errors import NotFoundError
from agentlightning.records import Finish, NewRollout
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store
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


async def finish(store: LightningStore, group: str, count: int) -> list[str]:
    """Rollouts of a group that have finished, in that order."""
    await store.enqueue([NewRollout(run_id="run", task={}, group_id=group, replica=n) for n in range(count)])
    claims = await store.claim(WORKER, limit=count)
    await store.finish([Finish(lease=claim.lease, state="succeeded") for claim in claims])
    return [claim.rollout.id for claim in claims]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path, "run")
    made.make()
    return made


async def test_rollouts_are_sent_as_they_finish_the_last_ones_at_the_end_and_a_resumed_run_goes_on_there(
    receiver: Receiver, folder: RunFolder, store: LightningStore
) -> None:
    async with TraceExport(receiver.url, folder, store, pytest.fail):
        sent = await finish(store, "a", 3)
        await receiver.came.wait()
        sent += await finish(store, "b", 2)
    assert receiver.rollouts == sent
    async with TraceExport(receiver.url, folder, store, pytest.fail):
        sent += await finish(store, "c", 1)
    assert receiver.rollouts == sent


async def test_a_collector_that_refuses_is_told_of_once_with_what_to_do_later(
    receiver: Receiver, folder: RunFolder, store: LightningStore
) -> None:
    receiver.status = 401
    notes: list[str] = []
    told = asyncio.Event()

    def tell(note: str) -> None:
        notes.append(note)
        told.set()

    async with TraceExport(receiver.url, folder, store, tell):
        await finish(store, "a", 1)
        await told.wait()
        await finish(store, "b", 1)
    [note] = notes
    assert "refuses traces with HTTP 401" in note
    assert f"agl runs export --as traces run --to {receiver.url}" in note
    assert len(receiver.rollouts) == 1


async def test_without_an_endpoint_nothing_is_sent_or_written(folder: RunFolder, store: LightningStore) -> None:
    async with TraceExport(None, folder, store, pytest.fail):
        await finish(store, "a", 1)
    assert not (folder.path / "traces_exported").exists()


async def test_an_export_that_cannot_note_how_far_it_came_is_told_of(
    receiver: Receiver, folder: RunFolder, store: LightningStore
) -> None:
    (folder.path / "traces_exported").mkdir()
    notes: list[str] = []
    async with TraceExport(receiver.url, folder, store, notes.append):
        await finish(store, "a", 1)
        await receiver.came.wait()
    [note] = notes
    assert "traces are no longer exported" in note


async def test_spans_that_a_collector_takes_and_rejects_are_told_of_once(
    receiver: Receiver, folder: RunFolder, store: LightningStore
) -> None:
    receiver.body = write_response(1, "too old")
    notes: list[str] = []
    async with TraceExport(receiver.url, folder, store, notes.append):
        sent = await finish(store, "a", 17)
    assert receiver.rollouts == sent
    assert notes == [f"traces: {receiver.url} takes them and rejects some spans: too old"]


async def test_the_command_sends_a_run_afterwards(receiver: Receiver, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    async with open_store(url) as store:
        await store.create_run("traced", {}, "run")
        ids = await finish(store, "a", 20)
    given = ["runs", "export", "run", "--as", "traces", "--store", url, "--to"]
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
