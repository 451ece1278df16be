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

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

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
        case kind:
            message: str = error["msg"].removeprefix("Value error, ")
            wanted = message.removeprefix("Input should be ")
            number = "a number " if kind.startswith(("greater_than", "less_than")) else ""
            return message if wanted == message else f"expected {number}{wanted}"


def _sentence(kind: type[BaseModel], error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _settings_at(kind, error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'none'}"
        return f"{name}: no such setting; {hint}"
    message = expected(error)
    given = "" if error["type"] == "missing" or isinstance(error["input"], dict) else f", got {error['input']!r}"
    return f"{name}: {message}{given}" if name else message


def _settings_at(kind: type[BaseModel], path: Sequence[Any]) -> list[str]:
    parts = iter(path)
    for part in parts:
        annotation = kind.model_fields[str(part)].annotation
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
            next(parts, None)  # the name that the user chose
        elif get_origin(annotation) is UnionType:
            annotation = get_args(annotation)[0]  # a table or None
        if dataclasses.is_dataclass(annotation):
            return [field.name for field in dataclasses.fields(annotation)]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    return list(kind.model_fields)
