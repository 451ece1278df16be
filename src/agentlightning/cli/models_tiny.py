"""``agl models tiny``: a model of your own in a minute, from demonstrations of your own, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tiny(
    demos: Annotated[
        Path, typer.Option("--demos", help='JSONL of conversations: {"messages": [{"role", "content"}, …]}.')
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder for the model; it must not exist.")],
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights and of the order of demonstrations.")] = 0,
) -> None:
    """Make a tokenizer and a small Llama, and warm-start it on demonstrations: what `agl train` can then train on reward."""
    import orjson

    from agentlightning.demo.imitation import make_policy, read_demonstrations
    from agentlightning.errors import InputError
    from agentlightning.trainer.display import Display

    if to.exists():
        raise InputError(f"--to {to}: exists already; name a new folder")
    read = read_demonstrations(demos)
    with Display(f"tiny {demos}") as display:
        facts = make_policy(
            read,
            to,
            seed=seed,
            threads=None,
            report=lambda row: display.phase(row["phase"], row["step"], row["of"]),
        )
    display.note(
        f"{facts['parameters']:,} parameters imitate {facts['demonstrations']:,} demonstrations; those held out cost "
        f"{facts['heldout_loss']:.2f} nats per token. Next: agl check TOML, with model.path = '{to}', says how often the "
        "agent succeeds with it; agl train TOML, with trainer.learning_rate = 1e-3, trains it on reward"
    )
    typer.echo(orjson.dumps(facts).decode())
