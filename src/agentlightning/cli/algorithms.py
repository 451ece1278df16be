"""``agl train --list-algorithms``: the names that the table [algorithm] takes."""

from __future__ import annotations

from pathlib import Path


def list_algorithms(file: Path | None) -> None:
    """Prints algorithms, credit rules, advantages, losses and aggregations, each with its source and settings.

    file: a configuration, whose own parts ``file.py:name`` are listed, too.
    """
    from rich.table import Table

    from agentlightning.algorithms.catalog import catalog, named_in
    from agentlightning.config.file import load_config
    from agentlightning.trainer.display import screen
    from agentlightning.trainer.policies import policy_configs

    configs = policy_configs(load_config(file)).values() if file is not None else ()
    own = dict.fromkeys(entry for config in configs for entry in named_in(config.algorithm))
    entries = [*catalog(), *own]
    for kind in dict.fromkeys(entry.kind for entry in entries):
        table = Table(kind, "from", "source", "settings", title_justify="left", box=None, pad_edge=False)
        for entry in entries:
            if entry.kind == kind:
                table.add_row(entry.name, entry.where, entry.source, ", ".join(entry.settings))
        screen().print(table)
        screen().print()
