"""``agl demo``: see an ordinary agent learn in a few minutes, on a laptop, without a key or a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentlightning.cli.options import Runs, Store, WithConsole
from agentlightning.records import JSON
from agentlightning.store.open import store_url

WIDE_HEADS = 32
"""Width of the tiny model's heads where vLLM may sample, which takes no smaller ones; else a quarter of the model's."""


def demo(
    task: Annotated[
        Literal["sql", "calculator", "lookup"], typer.Option("--task", help="What the agent does.")
    ] = "sql",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the model, the tasks and the sampling.")] = 0,
    control: Annotated[
        Literal["random-reward"] | None,
        typer.Option("--control", help="Train on a random reward, which teaches nothing."),
    ] = None,
    engine: Annotated[
        Literal["local", "verl"], typer.Option("--engine", help="What samples and learns: this machine, or verl.")
    ] = "local",
    learner: Annotated[
        Literal["local", "fsdp"], typer.Option("--learner", help="One process, or several that share the weights.")
    ] = "local",
    processes: Annotated[
        int | None,
        typer.Option(
            "-n", "--learner-processes", min=1, help="Number of them, or of verl's workers; needed with fsdp."
        ),
    ] = None,
    sampler: Annotated[
        Literal["local", "vllm"], typer.Option("--sampler", help="What samples: the local sampler or a vLLM server.")
    ] = "local",
    engine_python: Annotated[
        Path | None,
        typer.Option(
            "--engine-python", help="Interpreter that has vLLM or verl. [.venv-vllm/bin/python, .venv-verl/…]"
        ),
    ] = None,
    engine_options: Annotated[
        Path | None,
        typer.Option("--engine-options", help="TOML file with the table engine.options, with --engine verl."),
    ] = None,
    store: Store = None,
    runs: Runs = Path("runs"),
    console: WithConsole = False,
) -> None:
    """Build a tiny model, warm-start it on flawed demonstrations, train it on reward, and print what it learned."""
    import time

    import orjson

    from agentlightning.cli.train import report, supervised
    from agentlightning.config.base import parse_settings
    from agentlightning.config.engine import EngineConfig
    from agentlightning.demo.training import configure, summarize, warm_start
    from agentlightning.engines.base import EngineSetup, make_engine
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.training import new_run_id

    settings = demo_engine(engine, sampler, learner, processes, engine_python, engine_options)
    make_engine(EngineSetup(model="", work_dir=runs, config=parse_settings(EngineConfig, settings, "engine")))
    started = time.time()
    folder = RunFolder(runs, new_run_id())
    title = f"demo {task}, seed {seed}{f', {control}' if control else ''}"
    folder.make()
    model = folder.path / "warm-start"
    head_dim = WIDE_HEADS if engine == "verl" or sampler == "vllm" else None
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
        config = configure(task, seed, folder, model, store_url(store), control is not None, settings)
        result = supervised(config, folder, display, name=title, console=console)
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


def demo_engine(
    engine: str, sampler: str, learner: str, processes: int | None, python: Path | None, options: Path | None
) -> JSON:
    """The table [engine] beside the demo's own. ConfigError where an option would have no effect."""
    from agentlightning.config.file import read_toml
    from agentlightning.engines.verl.engine import merged
    from agentlightning.errors import ConfigError

    settings: JSON = {"name": engine}
    if engine == "verl":
        if (sampler, learner) != ("local", "local"):
            raise ConfigError(
                "--sampler and --learner have no effect with --engine verl, which does both; leave them out"
            )
        below = {"python": str(Path(".venv-verl/bin/python").absolute())}
        above: JSON = {} if processes is None else {"trainer": {"n_gpus_per_node": processes}}
        above |= {} if python is None else {"python": str(python.absolute())}
        given = {} if options is None else read_toml(options)
        return settings | {"device": "auto", "dtype": "float32", "options": merged(below | given, above)}
    if options is not None:
        raise ConfigError("--engine-options has no effect with --engine local; expected --engine verl")
    settings["learner"] = {"type": learner} | ({} if processes is None else {"processes": processes})
    if sampler == "vllm":
        settings["sampler"] = {
            "type": "vllm",
            "python": str((python or Path(".venv-vllm/bin/python")).absolute()),
            "arguments": ["--kv-cache-memory-bytes", "500000000"],
        }
    elif python is not None:
        raise ConfigError("--engine-python has no effect here; expected --engine verl or --sampler vllm")
    return settings
