"""``agl demo``: see an ordinary agent learn in a few minutes, on a laptop, without a key or a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentlightning.cli.options import Runs, Settings, Store, WithConsole, print_json
from agentlightning.errors import ConfigError
from agentlightning.records import JSON
from agentlightning.store.open import store_url

WIDE_HEADS = 32
"""Width of the tiny model's heads where vLLM may sample, which takes no smaller ones; else a quarter of the model's."""


def demo(
    task: Annotated[Literal["sql", "lookup"], typer.Option("--task", help="What the agent does.")] = "sql",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the model, the tasks and the sampling.")] = 0,
    control: Annotated[
        Literal["random-reward"] | None,
        typer.Option("--control", help="Train on a random reward, which teaches nothing."),
    ] = None,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
    console: WithConsole = False,
) -> None:
    """Build a tiny model, warm-start it on flawed demonstrations, train it on reward, and print what it learned.

    --set takes settings of [engine]: engine.learner.type=fsdp, engine.name=verl.
    """
    import time

    from agentlightning.cli.train import report, supervised
    from agentlightning.config.base import parse_settings
    from agentlightning.config.engine import EngineConfig
    from agentlightning.demo.training import configure, summarize, warm_start
    from agentlightning.engines.base import EngineSetup, make_engine
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.training import new_run_id

    engine = engine_table(settings or [])
    parsed = parse_settings(EngineConfig, engine, "engine")
    make_engine(EngineSetup(model="", work_dir=runs, config=parsed))  # refuses before the warm start
    started = time.time()
    folder = RunFolder(runs, new_run_id())
    title = f"demo {task}, seed {seed}{f', {control}' if control else ''}"
    folder.make()
    model = folder.path / "warm-start"
    head_dim = WIDE_HEADS if parsed.name == "verl" or parsed.sampler.type == "vllm" else None
    with Display(title) as display:
        try:
            warm = run_interruptible(lambda: warm_start(task, seed, model, display, head_dim))
        except KeyboardInterrupt:
            display.note("ended in the warm start: nothing is kept; the same command begins again")
            raise
        display.note(
            f"warm start: {warm['parameters']:,} parameters imitated a scripted demonstrator with bad habits "
            f"({warm['demonstrator']:.0%} success) for {warm['seconds']:.0f} s; from here on only the reward teaches"
        )
        config = configure(task, seed, folder, model, store_url(store), control is not None, engine)
        result = supervised(config, folder, display, name=title, console=console)
    report(display.console, result)
    if result.finished:
        summary = summarize(task, seed, started, warm["demonstrator"], result)
        display.console.print(_table(summary))
        print_json(summary)


def engine_table(settings: Sequence[str]) -> JSON:
    """The table [engine] of --set. ConfigError for settings of other tables, which are the demo's own."""
    from agentlightning.config.file import set_setting, setting_of

    table: JSON = {"engine": {}}
    for name, value in map(setting_of, settings):
        if not name.startswith("engine."):
            raise ConfigError(f"--set {name}: expected a setting of [engine]; the others are the demo's own")
        set_setting(table, name, value)
    verl = {"device": "auto", "dtype": "float32"} if table["engine"].get("name") == "verl" else {}
    return {**verl, **table["engine"]}


def _table(summary: dict[str, float]) -> object:
    from rich.table import Table

    table = Table(box=None, title="success on held-out tasks", title_justify="left")
    for column in ("", "greedy", "T = 1"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("demonstrator", "", f"{summary['demonstrator']:.2f}")
    for when in ("before", "after"):
        table.add_row(f"{when} training", *(f"{summary[f'{when}_{kind}']:.2f}" for kind in ("greedy", "t1")))
    return table
