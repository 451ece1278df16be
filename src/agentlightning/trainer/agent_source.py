"""Warnings from an agent's source about what would fail once it runs: a plain function that sets time limits by
SIGALRM. `agl train` and `agl check` say it before the run starts. Nothing is imported; what a library does inside is
known of math_verify alone."""

from __future__ import annotations

import ast
from pathlib import Path

ALARMS = {"signal": ("alarm", "setitimer"), "math_verify": ("parse", "verify")}
"""Functions that need the main thread, by module."""
NO_LIMIT = ("parsing_timeout", "timeout_seconds")
"""Arguments of math_verify that switch its time limit off where they are None."""


def alarm_warning(spec: str | None) -> str | None:
    """The sentence for a plain function that sets an alarm, itself or by functions of its file; None where none is seen."""
    source, _, name = (spec or "").rpartition(":")
    path = Path(source) if source.endswith(".py") else Path(*source.split(".")).with_suffix(".py") if source else Path()
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    known = {f"{module}.{function}" for module, names in ALARMS.items() for function in names}
    seen, left = set[str](), [name]
    while left:
        if (called := left.pop()) not in functions or called in seen:
            continue
        seen.add(called)
        for node in ast.walk(functions[called]):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node.func)
            first, dot, rest = text.partition(".")
            if f"{imported.get(first, first)}{dot}{rest}" in known and not _unlimited(node):
                return (
                    f"agent.run: {name} calls {text} ({path}, line {node.lineno}), which sets a handler of SIGALRM: that "
                    "works in the main thread alone, and plain functions are called in others; make the agent a program "
                    "(agent.command), move the call to the reward function, or switch that time limit off"
                )
            left.append(text)
    return None


def _unlimited(call: ast.Call) -> bool:
    return any(
        one.arg in NO_LIMIT and isinstance(one.value, ast.Constant) and one.value.value is None for one in call.keywords
    )
