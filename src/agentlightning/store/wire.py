"""Wire: how arguments and results of the store's methods travel between client and server, as msgpack or as JSON.

Driven by client.py, gateway/store_rpc.py and gateway/rest.py. All follows from the signatures of LightningStore: what is
decoded and checked, and what OpenAPI says of it. In msgpack, calls travel as the codec packs them, with arrays of 32 bits
for tokens.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from agentlightning.errors import InputError
from agentlightning.records import Call
from agentlightning.store import codec
from agentlightning.store.base import LightningStore

CONTENT_TYPE = "application/msgpack"
BATCH = "batch"
"""The route that takes several requests as a list of `Entry`, and answers with a list of `EntryResult`."""
BOOT_HEADER = "x-agl-boot"
KEY_HEADER = "idempotency-key"
BINDS_HEADER = "x-agl-binds"
"""Names, to the server that has the store, the token for which a further server creates a run: it becomes the token's."""

MAX_WAIT_S = 86_400.0
"""Seconds that a method may be asked to wait, or a lease to last."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]

METHODS = tuple(
    sorted(LightningStore.__abstractmethods__ - {"open", "close", "signing_secret"})  # those are no methods of clients
)


class NestingError(InputError):
    """A body that is nested too deeply to be read."""

    http_status = 400

    def __init__(self) -> None:
        super().__init__("body: expected less nesting")


class Entry(msgspec.Struct, array_like=True):
    """One of several requests that travel together; `arguments` as of its own request. It may not wait."""

    method: str
    key: str
    """Names this request: one that is sent again with the same name is answered as the first was."""
    arguments: msgspec.Raw


class EntryResult(msgspec.Struct, array_like=True):
    """The response to one of them, as of the method's own route."""

    status: int
    content: bytes


def encode(value: Any, name: str) -> bytes:
    """Any arguments or result. InputError that names the argument where it is not JSON."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise InputError(f"{name}: expected JSON: {error}") from None


def encode_record(record: Any, name: str) -> bytes:
    """One record to append, as an element of the argument of this name. InputError as above."""
    return encode(codec.encode_calls([record]) if isinstance(record, Call) else record, name)


def encode_result(method: str, result: Any) -> bytes:
    """The result of a method."""
    return codec.encode_calls(result) if method == "calls" else encode(result, method)


def decode_arguments(method: str, body: bytes | memoryview, as_json: bool = False) -> dict[str, Any]:
    """The arguments by name. InputError that names the argument where they are not the method's."""
    kind = arguments_type(method, packed=not as_json)
    try:
        given = msgspec.json.decode(body or b"{}", type=kind) if as_json else _arguments(method).decode(body)
    except RecursionError:
        raise NestingError from None
    except msgspec.DecodeError as error:
        raise InputError(sentence(str(error))) from None
    arguments = msgspec.structs.asdict(given)
    for name, value in arguments.items():
        if value != value:  # NaN is neither below a bound nor above it
            raise InputError(f"{name}: expected a number of seconds, got {value}")
    if method == "append_calls" and not as_json:
        try:
            arguments["calls"] = [call for packed in arguments["calls"] for call in codec.decode_calls(packed)]
        except RecursionError:
            raise NestingError from None
        except ValueError as error:
            raise InputError(f"calls: {error}") from None
    return arguments


_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.+)`")


_TYPE = re.compile(r"expected `(\w+)`")
_NAMES = {"float": "a number", "int": "an integer", "str": "text", "object": "an object", "array": "a list"}


def sentence(error: str) -> str:
    """msgspec's error as we say it.

    >>> sentence("Expected `int`, got `str` - at `$.worker.pid`"), sentence("Object missing required field `name`")
    ('worker.pid: expected an integer, got str', 'name: is required')
    """
    found = _PLACE.fullmatch(error)
    what, place = (error, None) if found is None else (found["what"], found["place"])
    if field := _FIELD.match(what):
        why = "is required" if field[1].startswith("missing") else "there is no such field"
        return f"{'.'.join(filter(None, (place, field[2])))}: {why}"
    what = _TYPE.sub(lambda kind: f"expected {_NAMES.get(kind[1], kind[1])}", what[:1].lower() + what[1:])
    return f"{place or 'body'}: {what}".replace("`", "")


def decode_result(method: str, content: bytes) -> Any:
    """The result of a method. Raises ValueError where it is none."""
    return codec.decode_calls(content) if method == "calls" else _result(method).decode(content)


def decode_entries(body: bytes) -> list[Entry]:
    """Requests that travelled together. InputError where they are none."""
    try:
        return _ENTRIES.decode(body)
    except RecursionError:
        raise NestingError from None
    except msgspec.DecodeError as error:
        raise InputError(f"body: {error}") from None


def decode_entry_results(content: bytes) -> list[EntryResult]:
    """Responses that travelled together. Raises msgspec.DecodeError where they are none."""
    return _RESULTS.decode(content)


@functools.cache
def arguments_type(method: str, packed: bool = False) -> type[msgspec.Struct]:
    """The arguments of a method; `packed`: as msgpack has them."""
    contract = getattr(LightningStore, method)
    parameters = inspect.signature(contract).parameters
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name, hint in typing.get_type_hints(contract).items():
        if name != "return":
            hint = list[bytes] if packed and hint == Sequence[Call] else Seconds if hint is float else hint
            default = parameters[name].default
            fields.append((name, hint) if default is inspect.Parameter.empty else (name, hint, default))
    name = "".join(part.capitalize() for part in (*method.split("_"), "arguments"))
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True, kw_only=True)


def result_type(method: str) -> Any:
    """The type of a method's result."""
    return typing.get_type_hints(getattr(LightningStore, method))["return"]


@functools.cache
def _arguments(method: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(arguments_type(method, packed=True))


@functools.cache
def _result(method: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(result_type(method))


def _plain(value: Any) -> Any:
    """Subclasses of JSON's own types (a library's strings and numbers) travel as what they are."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
SECRET = msgspec.json.Decoder(dict[str, bytes])
_ENTRIES = msgspec.msgpack.Decoder(list[Entry])
_RESULTS = msgspec.msgpack.Decoder(list[EntryResult])
