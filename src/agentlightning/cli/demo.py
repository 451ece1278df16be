"""``agl demo``: see an ordinary agent learn in a few minutes, on a laptop, without a key or a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentlightning.cli.options import Runs, Store
from agentlightning.store.open import store_url
from agentlightning.types import JSON

HEAD_DIM = {"local": None, "vllm": 32}
"""Width of the tiny model's heads: vLLM on a CPU takes no smaller ones; None is a quarter of the model's."""


def demo(
    task: Annotated[
        Literal["sql", "calculator", "lookup"], typer.Option("--task", help="What the agent does.")
    ] = "sql",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the model, the tasks and the sampling.")] = 0,
    control: Annotated[
        Literal["random-reward"] | None,
        typer.Option("--control", help="Train on a random reward, which teaches nothing."),
    ] = None,
    learner: Annotated[
        Literal["local", "fsdp"], typer.Option("--learner", help="One process, or several that share the weights.")
    ] = "local",
    processes: Annotated[
        int | None, typer.Option("-n", "--learner-processes", help="Number of them; needed with fsdp.")
    ] = None,
    sampler: Annotated[
        Literal["local", "vllm"], typer.Option("--sampler", help="What samples: the local sampler or a vLLM server.")
    ] = "local",
    vllm_python: Annotated[
        Path | None,
        typer.Option("--vllm-python", help="Interpreter that has vLLM, with --sampler vllm. [.venv-vllm/bin/python]"),
    ] = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Build a tiny model, warm-start it on flawed demonstrations, train it on reward, and print what it learned."""
    import time

    import orjson

    from agentlightning.cli.train import report, supervised
    from agentlightning.demo.training import configure, summarize, warm_start
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.training import new_run_id

    engine = _engine_settings(learner, processes, sampler, vllm_python)
    started = time.time()
    folder = RunFolder(runs, new_run_id())
    title = f"demo {task}, seed {seed}{f', {control}' if control else ''}"
    folder.make()
    model = folder.path / "warm-start"
    with Display(title) as display:
        try:
            warm = run_interruptible(lambda: warm_start(task, seed, model, display, HEAD_DIM[sampler]))
        except KeyboardInterrupt:
            display.note("ended in the warm start: nothing is kept; the same command begins again")
            raise
        display.note(
            f"warm start: {warm['parameters']:,} parameters imitated a scripted demonstrator with bad habits "
            f"({warm['demonstrator']:.0%} success) for {warm['seconds']:.0f} s; from here on only the reward teaches"
        )
        config = configure(task, seed, folder, model, store_url(store), control is not None, engine)
        result = supervised(config, folder, display, name=title)
    report(display.console, result)
    if not result.finished:
        return
    summary = summarize(task, seed, started, warm["demonstrator"], result)
    display.console.print(_table(summary))
    typer.echo(orjson.dumps(summary).decode())


def _table(summary: dict[str, float]) -> object:
    from rich.table import Table

    table = Table(box=None, title="success on held-out tasks", title_justify="left")
    for column in ("", "greedy", "T = 1"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("demonstrator", "", f"{summary['demonstrator']:.2f}")
    table.add_row("before training", f"{summary['before_greedy']:.2f}", f"{summary['before_t1']:.2f}")
    table.add_row("after training", f"{summary['after_greedy']:.2f}", f"{summary['after_t1']:.2f}")
    return table


def _engine_settings(learner: str, processes: int | None, sampler: str, vllm_python: Path | None) -> JSON:
    """The table [engine] beside the demo's own. ConfigError, before the warm start, where it cannot be."""
    from agentlightning.config_base import parse_settings
    from agentlightning.config_engine import EngineConfig
    from agentlightning.engines.vllm.arguments import check_settings
    from agentlightning.errors import ConfigError

    if vllm_python is not None and sampler != "vllm":
        raise ConfigError(f"--vllm-python has no effect with --sampler {sampler}; expected --sampler vllm")
    engine: JSON = {"learner": learner, "learner_processes": processes}
    if sampler != "vllm":
        parse_settings(EngineConfig, engine, "engine")
        return engine
    engine |= {"sampler": "vllm", "vllm": {"python": str(vllm_python or Path(".venv-vllm/bin/python"))}}
    engine["kv_cache_memory_gb"] = 0.5
    check_settings(parse_settings(EngineConfig, engine, "engine"))
    return engine
