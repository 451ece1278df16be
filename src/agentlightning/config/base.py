"""Base of every table of settings: unknown names are errors, and an error is a sentence with the setting's name.

The files of settings beside this one use it, and whoever checks settings of a function. It knows no setting.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from agentlightning.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


def checked_folder_url(url: str) -> str:
    """The URL; ValueError where it names no folder of a shared disk or an object store."""
    # Not more of what fsspec knows: a store's records name URLs, too, and some of its schemes run code or chain others.
    if not re.fullmatch(r"(file:///|s3://|abfs://)[^/?#:][^?#:]*", url):
        raise ValueError(
            "expected file:///FOLDER, s3://BUCKET/FOLDER or abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER"
        )
    return url.rstrip("/")


FolderUrl = Annotated[str, AfterValidator(checked_folder_url)]
"""A setting that is the URL of a folder."""


def checked_base_url(url: str) -> str:
    """The URL; ValueError where it is none of a server, or would show a password to all who read where the server is."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole or parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        raise ValueError("expected http(s)://HOST:PORT without user, query or fragment")
    return url


BaseUrl = Annotated[str, AfterValidator(checked_base_url)]
"""A setting that is the URL of a server, before any route."""


def matching(pattern: str, wanted: str) -> AfterValidator:
    """Checks that a text matches the pattern as a whole; the error says what is wanted, in words."""

    def checked(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"expected {wanted}")
        return text

    return AfterValidator(checked)


class Table(BaseModel):
    """A table of settings: unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, **settings: Any) -> None:
        """ConfigError, as for a table of a file, where a setting is unknown or wrong."""
        try:
            super().__init__(**settings)
        except ValidationError as cause:
            raise _error(type(self), cause, f"{type(self).__name__}: ") from cause

    # Of pydantic: a table inside another is not made by __init__, so that all problems are told at once, by dotted name.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class Tagged:
    """Annotation of a setting that is one of several tables, told apart by `type`: ``Annotated[AdamW | Muon, Tagged()]``.

    A bare name is the table with its defaults, a table without `type` the first one, `other` that of every further name,
    such as a plug-in's. None may be one of the choices.
    """

    def __init__(self, other: type[BaseModel] | None = None) -> None:
        self._other = other

    def kinds(self, union: Any) -> dict[str, type[BaseModel]]:
        """The tables of the annotated union by their `type`; for "" `other`."""
        tables = [kind for kind in get_args(union) if isinstance(kind, type) and issubclass(kind, Table)]
        return {"" if kind is self._other else kind.model_fields["type"].default: kind for kind in tables}

    def kind_of(self, union: Any, value: Any) -> str | None:
        """The `type` of a value; "" if it has no table of its own."""
        kinds = self.kinds(union)
        tag = value.get("type", next(iter(kinds))) if isinstance(value, dict) else getattr(value, "type", None)
        return tag if tag in kinds or "" not in kinds or not isinstance(tag, str) else ""

    def as_table(self, value: Any) -> Any:
        """A bare name as a table."""
        return {"type": value} if isinstance(value, str) else value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {tag: handler.generate_schema(kind) for tag, kind in self.kinds(source).items()}
        union = core_schema.tagged_union_schema(choices, lambda value: self.kind_of(source, value))
        schema = core_schema.no_info_before_validator_function(self.as_table, union)
        return core_schema.nullable_schema(schema) if type(None) in get_args(source) else schema


def parse_settings(kind: type[T], table: dict[str, Any], where: str, separator: str = ": ") -> T:
    """`table` as a `kind`; every problem in one ConfigError, a line each, with the dotted name of the setting."""
    try:
        return kind.model_validate(table)
    except ValidationError as cause:
        raise _error(kind, cause, f"{where}{separator}") from cause


def _error(kind: type[BaseModel], cause: ValidationError, opening: str) -> ConfigError:
    return ConfigError("\n".join(f"{opening}{_sentence(kind, error)}" for error in cause.errors()))


def expected(error: Any, table: str = "a table") -> str:
    """The expectation in one of pydantic's errors, without Python's types. `table`: what named values are called there.

    >>> expected({"type": "less_than", "msg": "Input should be less than 1"})
    'expected a number less than 1'
    """
    match error["type"]:
        case "missing":
            return "is required"
        case "tuple_type":
            return "expected a list"
        case "dict_type" | "model_type" | "dataclass_type":
            return f"expected {table}"
        case "union_tag_invalid":
            return f"expected one of {error['ctx']['expected_tags']}, got {error['ctx']['tag']!r}"
        case "union_tag_not_found":
            return "expected a name, or a table with the name as its type"
        case kind:
            message: str = error["msg"].removeprefix("Value error, ")
            wanted = message.removeprefix("Input should be ")
            number = "a number " if kind.startswith(("greater_than", "less_than")) else ""
            return message if wanted == message else f"expected {number}{wanted}"


def _sentence(kind: type[BaseModel], error: Any) -> str:
    name, known = _place(kind, error["loc"])
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'none'}"
        return f"{name}: no such setting; {hint}"
    message = expected(error)
    given = (
        ""
        if error["type"] in ("missing", "secret") or isinstance(error["input"], dict)
        else f", got {error['input']!r}"
    )
    return f"{name}: {message}{given}" if name else message


def _place(kind: type[BaseModel], loc: Sequence[Any]) -> tuple[str, list[str]]:
    """The dotted name of the setting at pydantic's `loc`, and the settings that the table around it knows."""
    names: list[str] = []
    known = list(kind.model_fields)
    fields: dict[str, Any] = dict(kind.model_fields)
    parts = iter(loc)
    for part in parts:
        names.append(str(part))
        field = fields.get(str(part))
        fields, known = {}, known if field is None else []
        if field is None:
            continue
        inner = field.annotation
        if get_origin(inner) is dict:
            inner = get_args(inner)[1]
            if (chosen := next(parts, None)) is not None:  # the name that the user chose
                names.append(str(chosen))
        tagged = next((each for each in field.metadata if isinstance(each, Tagged)), None)
        if tagged is not None:  # pydantic names the choice, too, which nobody wrote as a part of the name
            inner = tagged.kinds(inner).get(str(next(parts, "")))
        elif get_origin(inner) is UnionType:
            inner = get_args(inner)[0]  # a table or None
        if dataclasses.is_dataclass(inner):
            known = [each.name for each in dataclasses.fields(inner)]
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            fields, known = dict(inner.model_fields), list(inner.model_fields)
    return ".".join(names), known
