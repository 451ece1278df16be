"""Versions side by side on the screen: what `agl prompts test` and `agl models compare` print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.cli.options import print_columns

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.analysis.version_comparison import PairedComparison, TaskComparison

MAX_TRANSCRIPT_CHARS = 2000
"""Characters of one message that the screen shows."""
MAX_WIDTH = 160
"""Of the table of transcripts; what is piped has no width."""


def print_comparison(console: Console, compared: PairedComparison, transcripts: int) -> None:
    """Print figures, differences from the first version, reasons of failures, and some tasks with different rewards."""
    rows: list[tuple[str, ...]] = [("version", "reward", "failed", "calls", "prompt tokens", "sampled tokens")]
    for one in compared.figures:
        numbers = one.failed, one.calls, one.prompt_tokens, one.sampled_tokens
        rows.append((one.version, f"{one.reward_mean:.3f}", *map(str, numbers)))
        for name, own in one.agents.items() if len(one.agents) > 1 else ():
            numbers_of_agent = own.calls, own.prompt_tokens, own.sampled_tokens
            rows.append((f"  {name or 'no agent'}", "", "", *map(str, numbers_of_agent)))
    print_columns(console, rows)
    for each in compared.differences:
        told = f"{each.version} - {each.baseline}: "
        told += f"better on {each.better} of {len(compared.tasks)} tasks, worse on {each.worse}"
        if each.difference is not None:
            told += f"; {each.difference.value:+.3f} [{each.difference.low:+.3f}, {each.difference.high:+.3f}]"
            told += "" if each.difference.excludes_zero else ", which chance alone may do"
        console.print(told + ("" if each.p_value is None else f"; McNemar p = {each.p_value:.3g}"), soft_wrap=True)
    for one in compared.figures:
        for reason, count in one.failures.items():
            console.print(f"{one.version} failed {count} times: {reason}", soft_wrap=True, markup=False)
    different = [each for each in compared.tasks if len({one.reward for one in each.transcripts}) > 1]
    for task in (different or compared.tasks)[:transcripts]:
        _print_side_by_side(console, task)


def _print_side_by_side(console: Console, task: TaskComparison) -> None:
    from rich.table import Table
    from rich.text import Text

    from agentlightning.errors import printable

    shown = Text(printable(str(task.task))[:MAX_TRANSCRIPT_CHARS])
    table = Table(title=shown, width=min(console.width, MAX_WIDTH))
    cells = []
    for one in task.transcripts:
        reward = "no reward" if one.reward is None else f"reward {one.reward:g}"
        table.add_column(Text(f"{one.version}: {reward}"), ratio=1)
        told = [f"[{each.get('role')}] {each.get('content') or each.get('tool_calls')}" for each in one.messages]
        cells.append(Text(printable("\n".join(each[:MAX_TRANSCRIPT_CHARS] for each in [*told, one.error or ""]))))
    table.add_row(*cells)
    console.print(table)
