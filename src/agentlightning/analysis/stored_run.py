"""A stored run for a notebook: its metrics, rollouts, calls and rewards as Arrow tables, and any rollout to read.

``agl.load_run`` makes one. It only reads, through the store's methods and page by page, so it works on any store, also
beside the server of a run that goes on: each table is of the moment it is asked for. ``.to_pandas()`` and
``polars.from_arrow`` make a frame of a table.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from agentlightning.analysis.rollout_view import print_rollout
from agentlightning.errors import NotFoundError
from agentlightning.records import Call, Mode, Reward, Rollout, RolloutState, Run
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import existing_store, store_url
from agentlightning.store.scan import find_run, read_metrics, read_rollouts
from agentlightning.trainer.display import LiteralConsole

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")

VIEW_WIDTH = 1000
"""Columns of a rollout that is shown: whoever displays it wraps its lines."""
HTML = '<pre style="white-space:pre-wrap;line-height:1.3">{code}</pre>'


class RolloutFilters(TypedDict, total=False):
    """Filters of rollouts: all that are given must match."""

    step: int
    mode: Mode
    state: RolloutState


def load_run(run_id: str, store: str | None = None) -> StoredRun:
    """The run of this id in the store at this URL; by default AGL_STORE, else ``runs/agl.db``.

    A server's key is read from AGL_SERVER_KEY. NotFoundError where there is no such run or store.
    """
    url = store_url(store)
    return StoredRun(info=_read(url, lambda opened: find_run(opened, run_id)), _url=url)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run of a store, read when it is asked. Make it with `load_run`."""

    info: Run
    """Id, name, state, configuration and summary, as they were when it was loaded."""
    _url: str = field(repr=False)

    def metrics(self) -> pyarrow.Table:
        """A row per training step, a column per metric; steps that a crash undid are left out."""
        from agentlightning.store.parquet import pyarrow

        async def read(store: LightningStore) -> dict[int, dict[str, float]]:
            rows: dict[int, dict[str, float]] = {}
            async for page in read_metrics(store, self.info.id):
                for metric in page:
                    if not metric.abandoned:
                        rows.setdefault(metric.step, {})[metric.name] = metric.value
            return rows

        rows = _read(self._url, read)
        steps = sorted(rows)
        names = dict.fromkeys(name for step in steps for name in rows[step])
        columns = {name: pyarrow.array([rows[step].get(name) for step in steps], pyarrow.float64()) for name in names}
        return pyarrow.table({"step": pyarrow.array(steps, pyarrow.int64()), **columns})

    def rollouts(self, **filters: Unpack[RolloutFilters]) -> pyarrow.Table:
        """A row per rollout, oldest first, with the fields of `types.Rollout`. filters: step, mode, state."""
        return self._table(Rollout, None, filters)

    def calls(self, **filters: Unpack[RolloutFilters]) -> pyarrow.Table:
        """A row per model call of these rollouts' last attempts, with the fields of `types.Call`. Its prompt is what the
        call's parent (`parent_id`) did not have. filters: as in `rollouts`."""
        return self._table(Call, lambda store, ids: store.calls(ids), filters)

    def rewards(self, **filters: Unpack[RolloutFilters]) -> pyarrow.Table:
        """A row per reward that was recorded for these rollouts, by name, call and source. filters: as in `rollouts`."""
        return self._table(Reward, lambda store, ids: store.rewards(ids), filters)

    def show(self, rollout: str) -> RolloutView:
        """A rollout call by call: shown as it is in a notebook, else ``print(run.show(id))``."""

        async def read(store: LightningStore) -> RolloutView:
            found = await store.rollouts(RolloutQuery(run_id=self.info.id, ids=[rollout]))
            if not found:
                raise NotFoundError(f"{rollout}: no such rollout of run {self.info.id}")
            attempts, calls, rewards = await asyncio.gather(
                store.attempts([rollout]), store.calls([rollout]), store.rewards([rollout])
            )
            console = LiteralConsole(
                file=io.StringIO(), record=True, width=VIEW_WIDTH, markup=False, highlight=False, emoji=False
            )
            print_rollout(console, found[0], attempts, calls, rewards)
            return RolloutView(
                text=console.export_text(clear=False), html=console.export_html(inline_styles=True, code_format=HTML)
            )

        return _read(self._url, read)

    def _table(
        self,
        kind: type,
        records: Callable[[LightningStore, list[str]], Awaitable[list[Any]]] | None,
        filters: RolloutFilters,
    ) -> pyarrow.Table:
        from agentlightning.store.parquet import RecordTable, pyarrow

        table = RecordTable(kind)
        states = [state] if (state := filters.get("state")) is not None else None
        query = RolloutQuery(run_id=self.info.id, mode=filters.get("mode"), step=filters.get("step"), states=states)

        async def read(store: LightningStore) -> list[pyarrow.Table]:
            found = [table.schema.empty_table()]
            async for page in read_rollouts(store, query):
                ids = [rollout.id for rollout in page]
                found.append(table.of(page if records is None else await records(store, ids)))
            return found

        return pyarrow.concat_tables(_read(self._url, read))


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A rollout to read: text in a terminal, colours in a notebook."""

    text: str
    html: str = field(repr=False)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.html


def _read(url: str, work: Callable[[LightningStore], Awaitable[T]]) -> T:
    """Open the store, read, close it: on an event loop of its own, for that of a notebook runs already."""

    async def whole() -> T:
        async with existing_store(url) as store:
            return await work(store)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, whole()).result()
