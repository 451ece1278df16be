"""Reads the source of agents and reward functions for what would fail once they run: a name that is not there, a package
that is not installed, a plain function that sets time limits by SIGALRM.

`agl train`, `agl check` and `agl eval` say it before a model loads. Nothing is imported: that is for workers, which hold no
key; what a library does inside is known of math_verify alone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from agentlightning.errors import AgentError, ConfigError
from agentlightning.runtime.code_loader import is_code, module_file, place_of

if TYPE_CHECKING:
    from agentlightning.config.run import Config

ALARMS = {"signal": ("alarm", "setitimer"), "math_verify": ("parse", "verify")}
"""Functions that need the main thread, by module."""
NO_LIMIT = ("parsing_timeout", "timeout_seconds")
"""Arguments of math_verify that switch its time limit off where they are None."""


def check_source(config: Config) -> None:
    """Reads the functions of the agent and its rewards: ConfigError for one that its file does not define, AgentError for a
    file that is not Python or imports a package that is not installed."""
    agent = config.agent
    if agent.workers == 0 or config.env is not None:
        return  # another machine or interpreter has the code
    for spec, what in [(agent.run, "agent"), *((one.run, "reward function") for one in agent.reward)]:
        if spec is not None and is_code(spec):
            _check_named(spec, what)


def _check_named(spec: str, what: str) -> None:
    source, _, name = spec.rpartition(":")
    path = Path(source) if source.endswith(".py") else module_file(source)
    if path is None or path.suffix != ".py":
        return  # a finder or an extension that only an import knows
    if not path.is_file():
        raise ConfigError(f"{what} file {source!r} does not exist (looked from {Path.cwd()})")
    try:
        body = ast.parse(path.read_bytes(), str(path)).body
    except (SyntaxError, ValueError) as cause:
        raise AgentError(f"{what} {source!r} cannot be imported: {place_of(cause)}") from cause
    for line, module in _first_imports(body):
        if any((folder / module).is_dir() or (folder / f"{module}.py").is_file() for folder in path.resolve().parents):
            break  # a neighbour may change where modules are found
        if module not in sys.modules and find_spec(module) is None:
            where = f"imported at {path}:{line}"
            raise AgentError(f"{what} {source!r} cannot be imported: there is no module {module!r}, {where}")
    _check_defined(body, name.partition(".")[0], spec, what)


def _first_imports(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """(line, package) of each import above the first other statement, which may change where modules are found."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name.partition(".")[0]) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from [] if node.level or node.module is None else [(node.lineno, node.module.partition(".")[0])]
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return


def _check_defined(body: list[ast.stmt], name: str, spec: str, what: str) -> None:
    """Only where all names that the module has are seen: neither a star import nor code in a condition adds others."""
    functions = [one.name for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    plain = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Expr)
    main = "if __name__ == '__main__'"
    rest = [one for one in body if not isinstance(one, plain) and not ast.unparse(one).startswith(main)]
    imported = [each for one in body if isinstance(one, ast.Import | ast.ImportFrom) for each in one.names]
    known = {*functions, *((each.asname or each.name).partition(".")[0] for each in imported)}
    bound = {each.id for one in rest for each in ast.walk(one) if isinstance(each, ast.Name)}
    if name in known | bound | {"__getattr__"} or "*" in known or "__getattr__" in known:
        return
    if any(not isinstance(one, ast.Assign | ast.AnnAssign) for one in rest):
        return
    public = ", ".join(sorted(one for one in functions if not one.startswith("_"))) or "no public callables"
    raise ConfigError(f"{what} {spec!r}: there is no {name!r}; there are {public}")


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
