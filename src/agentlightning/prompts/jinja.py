"""Jinja as far as prompts need it: texts, fields and their members, conditions, loops, a few filters.

Driven by templates.py. Whoever writes a template of a run may be hostile to those who render it, so that the sandbox of the
library is the second wall: before a template is compiled, its syntax tree is read, and what is not listed here is refused.
What is left calls nothing and assigns nothing; loops share one bound of turns, and everything one of processor time. Texts
on the way to what is shown are as long as that may be. Fields are plain data: of another object its text is seen, nothing
else.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentlightning.errors import InputError, MissingExtraError
from agentlightning.prompts.bounds import Bounded, as_text, check_length, check_size

MAX_TURNS = 10_000
"""Turns of all loops of one rendering."""
MAX_NODES = 5_000
"""Parts of a template: each is compiled."""
MAX_DEPTH = 100
MAX_CPU_S = 0.5
"""Seconds of a processor that one rendering takes: whoever renders, answers others too."""

NODES = frozenset((
    "Template", "Output", "TemplateData", "Name", "Const", "List", "Tuple", "If", "CondExpr", "For", "Filter", "Test",
    "Compare", "Operand", "And", "Or", "Not", "Getattr", "Getitem", "Concat", "Add", "Sub", "Neg",
))  # fmt: skip
"""Constructs that a template may have. No call, no assignment, no macro, no other template, and no operator that makes a
long text of a short one."""

Fields = Mapping[str, object]


def placeholders(text: str) -> set[str]:
    """The fields that a template reads. InputError where it does not parse, or has a construct that none may have."""
    return _read(text)[1]


def render(text: str, fields: Fields) -> str:
    """The text with these fields. InputError where a construct of it fails, or it becomes too long."""
    _check_installed()
    from jinja2 import TemplateError

    made, work = Bounded(), _Work()
    try:
        data = {name: _plain(value) for name, value in fields.items()}
        for piece in _compiled(text).generate({**data, _WORK: work}):
            made.add(piece)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as cause:
        raise InputError(f"template: cannot be rendered: {cause}") from None
    return made.text()


_WORK = "agl_work"
"""Name, in a rendering, of what counts its work. No template can name it."""
_CONCAT = "agl_concat"
_RESERVED = (_WORK, "self", "caller", "varargs", "kwargs")


class _Work:
    def __init__(self) -> None:
        self._turns = MAX_TURNS
        self._end_s = time.thread_time() + MAX_CPU_S

    def check(self) -> None:
        if time.thread_time() > self._end_s:
            raise InputError(f"template: expected at most {MAX_CPU_S} s of a processor, took more")

    def over(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._turns -= 1
            if self._turns < 0:
                raise InputError(f"template: expected at most {MAX_TURNS} turns of its loops, got more")
            self.check()
            yield item


def _check_installed() -> None:
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError as cause:
        raise MissingExtraError("jinja2", "server") from cause


@functools.cache
def _environment() -> Any:
    _check_installed()
    from jinja2 import StrictUndefined, pass_context
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class DataEnvironment(ImmutableSandboxedEnvironment):
        """Members are those of data: keys and places, never attributes of Python's objects, save the counters of loops."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            return super().getattr(obj, attribute) if isinstance(obj, LoopContext) else self.getitem(obj, attribute)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            context[_WORK].check()
            if all(isinstance(side, str | list | tuple) for side in (left, right)):
                check_length(len(left) + len(right))
            return super().call_binop(context, operator, left, right)

        def getitem(self, obj: Any, argument: Any) -> Any:
            try:
                return obj[argument]
            except (LookupError, TypeError):
                return self.undefined(obj=obj, name=argument)

    environment = DataEnvironment(
        undefined=StrictUndefined, finalize=as_text, keep_trailing_newline=True, cache_size=0, optimized=False
    )
    environment.intercepted_binops = frozenset("+")
    environment.globals.clear()
    environment.filters.clear()
    for name, function in _FILTERS.items():
        environment.filters[name] = pass_context(_bounded(function))
    environment.filters[_CONCAT] = pass_context(_bounded(_join))
    environment.filters[_WORK] = pass_context(lambda context, items: context[_WORK].over(items))
    return environment


def _read(text: str) -> tuple[Any, set[str]]:
    """The syntax tree, checked, and the fields that it reads."""
    environment = _environment()
    from jinja2 import TemplateSyntaxError

    try:
        tree = environment.parse(text)
    except TemplateSyntaxError as cause:
        raise InputError(f"template: line {cause.lineno}: {cause.message}") from None
    except (
        RecursionError,
        ValueError,
    ) as cause:  # parentheses by the thousand; a number of more digits than Python reads
        raise InputError(f"template: cannot be read: {type(cause).__name__}") from None
    reader = _Reader()
    reader.read(tree, frozenset(), 0)
    return tree, reader.fields


class _Reader:
    """Checks the nodes of a tree, and collects the fields that they read: names that no loop around them binds."""

    def __init__(self) -> None:
        self.fields: set[str] = set()
        self._nodes = 0

    def read(self, node: Any, bound: frozenset[str], depth: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise InputError(f"template: expected at most {MAX_NODES} constructs, {MAX_DEPTH} within each other")
        _check(node)
        kind = type(node).__name__
        if kind == "Name" and node.ctx == "load" and node.name not in bound:
            self.fields.add(node.name)
        inner = bound
        if kind == "For":
            targets = node.target.items if type(node.target).__name__ == "Tuple" else [node.target]
            _check_iterated(node.iter, bound)
            inner = bound | {"loop"} | {getattr(each, "name", "") for each in targets}
        outside = [node.iter, *node.else_] if kind == "For" else []
        for child in node.iter_child_nodes():
            self.read(child, bound if any(child is each for each in outside) else inner, depth + 1)


def _check(node: Any) -> None:
    kind = type(node).__name__
    line = f"template: line {node.lineno}"
    if kind not in NODES:
        raise InputError(f"{line}: expected texts, fields, if, for and filters, got {kind.lower()}")
    if kind == "Filter" and node.name not in _FILTERS:
        raise InputError(f"{line}: expected one of the filters {', '.join(sorted(_FILTERS))}, got {node.name}")
    if kind == "For" and node.recursive:
        raise InputError(f"{line}: expected a loop that is not recursive")
    if kind == "Name" and node.name in _RESERVED:
        raise InputError(f"{line}: expected another name than {node.name}")


def _check_iterated(node: Any, bound: frozenset[str], listed: bool = False) -> None:
    """A loop over a list of what loops around it bind makes, loop by loop, as much of it as it likes."""
    kind = type(node).__name__
    if listed and kind == "Name" and node.name in bound:
        raise InputError(
            f"template: line {node.lineno}: expected a loop over fields, got one over a list with {node.name}"
        )
    for child in node.iter_child_nodes():
        _check_iterated(child, bound, listed or kind in ("List", "Tuple"))


@functools.lru_cache(maxsize=256)
def _compiled(text: str) -> Any:
    environment, (tree, _) = _environment(), _read(text)
    from jinja2 import Template, nodes
    from jinja2.visitor import NodeTransformer

    def filtered(node: Any, name: str, line: int) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=line).set_environment(environment)

    class Bounding(NodeTransformer):
        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            node.iter = filtered(node.iter, _WORK, node.lineno)
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT, node.lineno)

    tree = Bounding().visit(tree)
    try:
        return Template.from_code(environment, environment.compile(tree), {})
    except (RecursionError, SyntaxError, MemoryError) as cause:  # loops or parentheses, deeper than Python compiles
        raise InputError(f"template: cannot be compiled: {type(cause).__name__}") from None


def _plain(value: object) -> object:
    """Data as JSON has it: whatever else a field holds is its text. Dicts and lists have no attributes worth reading."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value)


def _bounded(function: Any) -> Any:
    @functools.wraps(function)
    def bounded(context: Any, *arguments: Any) -> Any:
        context[_WORK].check()
        made = function(*arguments)
        if isinstance(made, str):
            check_length(len(made))
        return made

    return bounded


def _join(items: Iterable[Any], separator: str = "") -> str:
    made = Bounded()
    for place, item in enumerate(items):
        made.add(as_text(separator) if place else "")
        made.add(as_text(item))
    return made.text()


def _json(value: object) -> str:
    check_size(value)
    return json.dumps(value, ensure_ascii=False)


_FILTERS: Mapping[str, Any] = {
    "capitalize": lambda value: as_text(value).capitalize(),
    "first": lambda value: value[0],
    "join": _join,
    "last": lambda value: value[-1],
    "length": len,
    "lower": lambda value: as_text(value).lower(),
    "title": lambda value: as_text(value).title(),
    "tojson": _json,
    "trim": lambda value: as_text(value).strip(),
    "upper": lambda value: as_text(value).upper(),
}
