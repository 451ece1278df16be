"""Checks of settings by their annotations: those of the algorithms and of credit rules.

Made from Python or from TOML, they are not converted on the way in: a text is no number. Knows no setting by name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from agentlightning.config.base import parse_settings
from agentlightning.errors import ConfigError
from agentlightning.runtime.code_loader import path_of_code

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def strict_table(fields: Mapping[str, tuple[Any, Any]]) -> type[BaseModel]:
    """A table of these settings, each with its type and its default (``...``: none)."""
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return create_model("Settings", __config__=strict, **dict[str, Any](fields))


def check_settings(settings: DataclassInstance, where: str = "algorithm") -> None:
    """Check the fields of a frozen dataclass as it is made; a list that stands for a tuple becomes one, and so on.

    ConfigError, a sentence for each that is wrong.
    """
    hints = _hints(type(settings), f"{where}: {type(settings).__name__}")
    given = {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}
    checked = parse_settings(strict_table({name: (hints[name], ...) for name in given}), given, where, ".")
    for name in given:
        object.__setattr__(settings, name, getattr(checked, name))


def function_settings(function: Callable[..., Any], given: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """`given` checked against the keyword-only arguments of a plug-in, which are its settings; those left out have their
    defaults. ConfigError for an unknown or a wrong one. `setting` is the table's own name, such as loss_settings."""
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
    return path_of_code(given, "algorithm")


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) and one for one in given):
        raise ValueError("expected a list of names")
    return tuple(given)


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
CodeName = Annotated[str, BeforeValidator(code_name)]
"""A built-in name, that of an entry point, ``file.py:name``, or the function itself."""
UnitInterval = Annotated[float, Field(strict=True, ge=0, le=1)]
