"""``agl check``: one rollout before paying for more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Runs, Settings, Store, run_shown, store_setting


def check(
    config: Annotated[Path, typer.Argument(help="TOML file with the configuration.")],
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Training tasks for the base success.")] = 32,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run the agent on one task and show its calls, tokens and reward; then the base success over a few tasks."""
    import orjson

    from agentlightning.analysis.rollout_view import print_rollout
    from agentlightning.config.file import load_config
    from agentlightning.trainer.check import check_agent
    from agentlightning.trainer.display import screen
    from agentlightning.trainer.load_trajectories import used_tokens
    from agentlightning.trainer.model_weights import with_versions

    loaded = with_versions(load_config(config, settings or [], store_setting(store)), runs)
    checked = run_shown(f"check {config}", runs, lambda folder, display: check_agent(loaded, folder, display, tasks))
    print_rollout(
        screen(),
        checked.rollout,
        checked.attempts,
        checked.calls,
        checked.rewards,
        feedback=checked.feedback,
    )
    if checked.failure is not None:
        raise checked.failure
    if checked.warning:
        screen().print(f"note: {checked.warning}", style="yellow", soft_wrap=True)
    used = [used_tokens(call) for call in checked.calls]
    typer.echo(
        orjson.dumps(
            {
                "calls": len(checked.calls),
                "prompt_tokens": sum(prompt for prompt, _ in used),
                "sampled_tokens": sum(sampled for _, sampled in used),
                "forked_calls": sum(call.fork_cause is not None for call in checked.calls),
                "reward": checked.rollout.reward,
                "base_success": checked.success,
                "tasks": checked.tasks,
            }
        ).decode()
    )
