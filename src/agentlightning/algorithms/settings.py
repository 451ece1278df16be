"""Settings of algorithms: parts that are one of several, and checks by annotations.

An algorithm is a frozen dataclass whose fields are its settings; a field that is a choice with settings of its own holds a
table (`AlgorithmPart`). Made from Python or from TOML, values are not converted: a text is no number. Knows no setting.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from agentlightning.config.base import Table, Tagged, parse_settings
from agentlightning.errors import ConfigError
from agentlightning.runtime.code_loader import path_of_code

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class AlgorithmPart(Table):
    """A table of `[algorithm]`: the settings of one choice, whose name is `type`."""

    model_config = ConfigDict(strict=True)


class NamedPart(AlgorithmPart):
    """A choice that has no table here: a built-in one without settings, or code with the settings that it declares."""

    model_config = ConfigDict(extra="allow")

    type: str

    @property
    def settings(self) -> dict[str, Any]:
        """Those that are given."""
        return dict(self.model_extra or {})


class PartChoice(Tagged):
    """Annotation of a setting that is one of several parts: ``Annotated[PpoClip | Gspo | NamedPart | str, PartChoice()]``. A
    function stands for the part that it is; with `NamedPart` in the union any other name is taken."""

    def __init__(self) -> None:
        super().__init__(NamedPart)

    def as_table(self, value: Any) -> Any:
        """A name or a function as a table; a table whose `type` is a function with its name."""
        if isinstance(value, Mapping):
            return {**value, "type": code_name(value["type"])} if "type" in value else dict(value)
        return value if isinstance(value, BaseModel | bool | int | float | list) else {"type": code_name(value)}


class Shorthand:
    """Annotation of a setting that is one table, the first of the annotated union, or a bare value of its main setting."""

    def __init__(self, main: str) -> None:
        self._main = main

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def as_table(value: Any) -> Any:
            return value if isinstance(value, Mapping | BaseModel) else {self._main: code_name(value)}

        table = handler.generate_schema(get_args(source)[0])
        return core_schema.no_info_before_validator_function(as_table, table)


def name_of(part: object) -> str:
    """The name of a part of an algorithm that was made, whose parts are tables."""
    return str(getattr(part, "type", part))


def as_table(algorithm: DataclassInstance) -> dict[str, Any]:
    """The settings as a table of plain values, as a configuration holds them; a part without settings is its name."""

    def plain(value: Any) -> Any:
        if isinstance(value, NamedPart) and not value.settings:
            return value.type
        return value.model_dump(mode="json") if isinstance(value, BaseModel) else value

    return {one.name: plain(getattr(algorithm, one.name)) for one in dataclasses.fields(algorithm)}


def strict_table(fields: Mapping[str, tuple[Any, Any]]) -> type[BaseModel]:
    """A table of these settings, each with its type and its default (``...``: none)."""
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return create_model("Settings", __config__=strict, **dict[str, Any](fields))


@lru_cache(maxsize=64)
def _table_of(kind: type[DataclassInstance], where: str) -> type[BaseModel]:
    hints = _hints(kind, f"{where}: {kind.__name__}")
    return strict_table({one.name: (hints[one.name], ...) for one in dataclasses.fields(kind)})


def check_settings(settings: DataclassInstance, where: str = "algorithm") -> None:
    """Check the fields of a frozen dataclass as it is made; a list for a tuple becomes one. ConfigError."""
    given = {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}
    checked = parse_settings(_table_of(type(settings), where), given, where, ".")
    for name in given:
        object.__setattr__(settings, name, getattr(checked, name))


def function_settings(function: Callable[..., Any], given: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """`given` checked against the keyword-only arguments of a function, which are its settings. ConfigError. `setting` names
    the part, such as loss."""
    taken = {name: one for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY}
    annotations = {name: one.annotation for name, one in taken.items() if one.annotation is not one.empty}
    # Of these alone: other annotations may name what is imported for type checkers only.
    holder = type("Annotations", (), {"__annotations__": annotations})
    hints = _hints(holder, f"algorithm.{setting}", getattr(function, "__globals__", {}))
    fields = {
        name: (hints.get(name, Any), ... if one.default is one.empty else one.default) for name, one in taken.items()
    }
    model = strict_table({setting: (strict_table(fields), ...)})
    checked = getattr(parse_settings(model, {setting: dict(given)}, "algorithm", "."), setting)
    return {name: getattr(checked, name) for name in fields}


def _hints(holder: type, where: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """The annotations of a class. ConfigError for one that names nothing, or nothing at run time."""
    try:
        return get_type_hints(holder, globalns=names, include_extras=True)
    except Exception as cause:  # annotations are code
        raise ConfigError(
            f"{where}: an annotation of a setting cannot be resolved ({type(cause).__name__}: {cause}); import what it "
            "names at the top of the file"
        ) from cause


def code_name(given: Any) -> Any:
    """A function or class of a file as the text that names it; for settings that may name code."""
    if isinstance(given, str) or not callable(given):
        return given
    known = getattr(given, "path", None)
    return path_of_code(given, "algorithm") if known is None else known


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) and one for one in given):
        raise ValueError("expected a list of names")
    return tuple(given)


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
UnitInterval = Annotated[float, Field(strict=True, ge=0, le=1)]
