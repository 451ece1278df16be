"""Options that several commands share, declared once, what they mean, and how commands print."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from agentlightning.errors import ConfigError, NotFoundError, one_line
from agentlightning.store.open import existing_store, store_url

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from agentlightning.analysis.intervals import Interval
    from agentlightning.config.run import Config
    from agentlightning.records import Checkpoint
    from agentlightning.runner.scoring import Scorer
    from agentlightning.store.base import LightningStore
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display

T = TypeVar("T")

REWARD_FUNCTION = "Reward function file.py:name, or a TOML file whose [agent] has a reward: a program or a judge, too."
ADDRESSES = ("engine.listen", "engine.advertise", "engine.sampler.weights")
"""Settings of one host: a run that goes on or is evaluated on another keeps all but these."""
BYTES: Mapping[str, int] = MappingProxyType({"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12})
SECONDS: Mapping[str, int] = MappingProxyType({"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800})

Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds a folder for every run.")]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Store URL: sqlite:///PATH, postgresql://…, redis://…, memory:// or http://SERVER. "
        "[AGL_STORE, else runs/agl.db]",
    ),
]
Server = Annotated[
    str | None,
    typer.Option("--server", help="URL of a running `agl serve` (its key in AGL_SERVER_KEY)."),
]
WithConsole = Annotated[bool, typer.Option("--console", help="Also start the web console, and print its URL.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]
Mode = Annotated[Literal["train", "eval"] | None, typer.Option("--mode", help="Only these rollouts; both by default.")]
Step = Annotated[int | None, typer.Option("--step", help="Only rollouts enqueued for this training step.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")]
TrustedProxies = Annotated[
    list[str] | None, typer.Option("--trusted-proxy", help="Address or network whose X-Forwarded-… are believed.")
]
TrustRun = Annotated[
    bool,
    typer.Option("--trust-run", help="Import the code that the run's record names: whoever recorded it is trusted."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: --set trainer.steps=20. May be repeated."),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="Sampling temperature; 0 is greedy.")]


def with_store(store: str | None, work: Callable[[LightningStore], Awaitable[T]]) -> T:
    """Do the work on the store of --store, which must exist; a server's key is read from AGL_SERVER_KEY."""

    async def whole() -> T:
        async with existing_store(store_url(store)) as opened:
            return await work(opened)

    return asyncio.run(whole())


def one_store(store: str | None, server: str | None) -> str | None:
    """The store's URL from --store or --server; ConfigError where both are given."""
    if store and server:
        raise ConfigError("--store: a server has a store of its own; give --store or --server, not both")
    return server or store


def store_setting(store: str | None) -> dict[str, str]:
    """The store given, else AGL_STORE, as a setting; empty where neither is."""
    url = store or os.environ.get("AGL_STORE")
    return {"store.url": url} if url else {}


def trained_checkpoint(store: str, folder: RunFolder) -> Checkpoint:
    """The last checkpoint of a run, with its folder on this host. NotFoundError where it has none."""
    from agentlightning.trainer.checkpoint_files import last_checkpoint

    found = with_store(store, lambda opened: last_checkpoint(opened, folder))
    if found is None:
        raise NotFoundError(f"{folder.run_id}: has no checkpoint yet; see: agl runs list")
    return found


def own_config(folder: RunFolder, settings: Sequence[str] | None, store: str | None) -> Config:
    """A run's own configuration, at the addresses of this host where `settings` has them. ConfigError for other settings."""
    from agentlightning.config.file import with_overrides
    from agentlightning.trainer.checkpoint import run_config

    if any(one.partition("=")[0].strip() not in ADDRESSES for one in settings or ()):
        raise ConfigError(
            "--set: a run keeps its own configuration; give no other settings than addresses of this host: "
            f"{', '.join(ADDRESSES)}"
        )
    config = run_config(folder, store)
    return with_overrides(config, settings) if settings else config


def reward_scorer(function: str, threads: Executor) -> Scorer:
    """The scorer that --with names. ConfigError where it cannot be loaded."""
    from agentlightning.config.file import load_config
    from agentlightning.runner.llm_judge import external_judge
    from agentlightning.runner.scoring import load_scorers
    from agentlightning.runner.shared_process import watch_signals

    watch_signals()
    config = load_config(Path(function)) if function.endswith(".toml") else None
    specs = [function] if config is None else config.agent.reward_specs
    if not specs:
        raise ConfigError(f"{function}: its [agent] has no reward function")
    return load_scorers(specs, threads, external_judge({} if config is None else config.external))


def run_shown(title: str, runs: Path, work: Callable[[RunFolder, Display], Coroutine[Any, Any, T]]) -> T:
    """Do the work of a new run under a live display. SIGTERM and SIGHUP end it as Ctrl-C does: recorded as interrupted."""
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.training import new_run_id

    with Display(title) as display:
        return run_interruptible(lambda: work(RunFolder(runs, new_run_id()), display))


def say(text: str = "", style: str | None = None) -> None:
    """Print a line, however long."""
    from agentlightning.trainer.display import screen

    screen().print(text, soft_wrap=True, style=style)


def print_columns(rows: Sequence[Sequence[str]], empty: str = "") -> None:
    """Print rows of text, each column as wide as its longest cell; `empty` in place of a table that has a head alone."""
    if empty and len(rows) < 2:
        say(empty)
        return
    rows = [[one_line(text) for text in row] for row in rows]  # nobody's text makes a row of its own
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def print_json(record: Any) -> None:
    """Print a record, or a list of them, as one line of JSON; a number that is not finite is null."""
    import orjson

    typer.echo(orjson.dumps(record, option=orjson.OPT_NON_STR_KEYS, default=str).decode())


def number(value: object, form: str = ".3f") -> str:
    """A figure of a table; a dash for none."""
    return format(value, form) if isinstance(value, int | float) else "-"


def interval(one: Interval | None, form: str) -> str:
    """An estimate with its 95 % interval; a dash for none."""
    return "-" if one is None else f"{one.value:{form}} [{one.low:{form}}, {one.high:{form}}]"


def time_text(nanoseconds: int | None) -> str:
    """A time in UTC; a dash for none."""
    return "-" if nanoseconds is None else f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S}"


def bytes_of(text: str | None, name: str) -> int | None:
    """A size such as 10GB; ConfigError that names the option otherwise."""
    return None if text is None else int(_quantity(text.upper(), name, BYTES, "a size such as 10GB or 500MB"))


def seconds_of(text: str | None, name: str) -> float | None:
    """A time such as 90m, 12h or 7d; ConfigError that names the option otherwise."""
    return None if text is None else _quantity(text, name, SECONDS, "a time such as 90m, 12h, 30d or 8w")


def _quantity(text: str, name: str, units: Mapping[str, int], expected: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2] not in units:
        raise ConfigError(f"{name}: expected {expected}, got {text!r}")
    return float(match[1]) * units[match[2]]
