"""``agl eval``: held-out success of a configured model or of a run's trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Runs, Settings, Store, run_until_signal, store_setting, trained_checkpoint


def evaluate(
    target: Annotated[str, typer.Argument(help="Id of a run (its last checkpoint) or a TOML file (its model).")],
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run every held-out task once greedily and once at temperature 1, and print the success of both."""
    import orjson

    from agentlightning.config_file import load_config
    from agentlightning.errors import ConfigError
    from agentlightning.trainer.check import evaluate_model
    from agentlightning.trainer.checkpoint import RunFolder, policies_in
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.policies import with_models
    from agentlightning.trainer.training import new_run_id

    if target.endswith(".toml"):
        config = load_config(Path(target), settings or [], store_setting(store))
    else:
        if settings:
            raise ConfigError("--set works on a TOML file; a run is evaluated with its own configuration")
        config = RunFolder(runs, target).config(store)
        config = with_models(config, policies_in(Path(trained_checkpoint(config.store.url, target).path)))
    with Display(f"eval {target}") as display:
        success = run_until_signal(
            evaluate_model(config, RunFolder(runs, new_run_id()), display, name=f"eval {target}")
        )
    typer.echo(orjson.dumps({"target": target, **success}).decode())
