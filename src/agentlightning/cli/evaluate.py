"""``agl eval``: held-out success of a configured model or of a run's trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Runs, Settings, Store, own_config, run_shown, store_setting, trained_checkpoint


def evaluate(
    target: Annotated[str, typer.Argument(help="Id of a run (its last checkpoint) or a TOML file (its model).")],
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run every held-out task once greedily and once at temperature 1, and print the success of both.

    An external model (model.path = "external:NAME") runs every task once, sampled as the agent asks.
    """
    import orjson

    from agentlightning.config.file import load_config
    from agentlightning.trainer.check import evaluate_model
    from agentlightning.trainer.checkpoint import RunFolder, policies_in
    from agentlightning.trainer.model_weights import with_versions
    from agentlightning.trainer.policies import with_models

    if target.endswith(".toml"):
        config = with_versions(load_config(Path(target), settings or [], store_setting(store)), runs)
    else:
        folder = RunFolder(runs, target)
        config = own_config(folder, settings or [], store)
        config = with_models(config, policies_in(Path(trained_checkpoint(config.store.url, folder).path)))
    title = f"eval {target}"
    success = run_shown(title, runs, lambda own, display: evaluate_model(config, own, display, title))
    typer.echo(orjson.dumps({"target": target, **success}).decode())
