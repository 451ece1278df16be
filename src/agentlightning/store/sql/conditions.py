"""Filters over summaries as SQL conditions, for whatever columns they are asked of.

Driven by summaries.py, for rows, and columns.py, for the texts of a run. Every value is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from sqlalchemy import BigInteger, Boolean, ColumnElement, Double, Text, and_, func, literal, not_, or_, true

from agentlightning.store.where import AGENT, COMPARISONS, AllOf, Comparison, Filter, Not, Value

_TYPES: dict[type, Any] = {bool: Boolean(), int: BigInteger(), float: Double(), str: Text()}

Columns = Callable[[str], ColumnElement[Any]]


def condition(tree: Filter, columns: Columns, sqlite: bool) -> ColumnElement[bool]:
    """The filter as a condition on these columns; every value is a parameter."""
    if isinstance(tree, Comparison):
        return _comparison(tree, columns, sqlite)
    if isinstance(tree, Not):
        return not_(condition(tree.part, columns, sqlite))
    parts = [condition(part, columns, sqlite) for part in tree.parts]
    return and_(true(), *parts) if isinstance(tree, AllOf) else or_(*parts)


def _comparison(comparison: Comparison, columns: Columns, sqlite: bool) -> ColumnElement[bool]:
    sign = comparison.sign
    find = func.instr if sqlite else func.strpos
    if comparison.field == AGENT:
        # A name begins behind a bracket or a comma of its JSON list, and a quote within one behind a backslash.
        listed = columns("agents")
        quoted = [orjson.dumps(value).decode() for value in comparison.values]
        found = or_(*(find(listed, before + name) > 0 for name in quoted for before in "[,"))
        return not_(found) if sign == "!=" else found
    column = columns(comparison.field)
    if sign == "is null":
        return column.is_(None)
    values = [typed(value) for value in comparison.values]
    if sign == "in":
        return column.in_(values)
    if sign == "~":
        return find(column, values[0]) > 0
    compare: Callable[..., Any] = COMPARISONS[sign]
    compared: ColumnElement[bool] = compare(column, values[0])
    return compared


def typed(value: Value | None) -> ColumnElement[Any]:
    """A parameter of the value's own type: a column's would round a number that is no integer."""
    return literal(value, _TYPES[type(value)])
