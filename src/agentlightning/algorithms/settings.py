"""Checks of settings by their annotations: those of the algorithms and of credit rules.

Made from Python or from TOML, they are not converted on the way in: a text is no number. Knows no setting by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from agentlightning.config_base import parse_settings

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
    hints = get_type_hints(type(settings), include_extras=True)
    given = {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}
    checked = parse_settings(strict_table({name: (hints[name], ...) for name in given}), given, where, ".")
    for name in given:
        object.__setattr__(settings, name, getattr(checked, name))


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) and one for one in given):
        raise ValueError("expected a list of names")
    return tuple(given)


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
UnitInterval = Annotated[float, Field(strict=True, ge=0, le=1)]
