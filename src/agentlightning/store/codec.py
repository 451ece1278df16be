"""One description of the records of types.py: SQL columns, Redis fields, Parquet and binary forms all follow from it.

A record is a row of its fields in their order: nested values are JSON text; token ids are int32 arrays and logprobs float32
arrays, both little-endian as every machine that runs this is. Pure functions, driven by the stores and by whoever moves
calls between processes. Rows are stored by position, so a new field goes last, and has a default.
"""

from __future__ import annotations

import functools
import math
import typing
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

import msgspec
import orjson

from agentlightning.errors import InputError
from agentlightning.records import (
    Call,
    CallCredit,
    Consumed,
    Metric,
    NewRollout,
    Resource,
    RetryPolicy,
    Reward,
    Rollout,
    Run,
    Span,
)

T = TypeVar("T")

Row = tuple[Any, ...]

MAX_IDS_PER_QUERY = 10_000  # below SQLite's bound of 32766 parameters in a statement

ARRAYS: Mapping[tuple[type, str], str] = {
    (Call, "suffix_ids"): "i",
    (Call, "sampled_ids"): "i",
    (Call, "logprobs"): "f",
    (CallCredit, "token_advantages"): "f",
    (CallCredit, "token_ratios"): "f",
    (CallCredit, "token_entropies"): "f",
}
"""Fields that are arrays of 32-bit numbers, with their code in `array`."""
PRINTED: Mapping[type, frozenset[str]] = {
    Call: frozenset({"model"}),
    Span: frozenset({"name", "status_message"}),
    Reward: frozenset({"name"}),
}
"""Fields whose text comes from programs, and may be none that a database takes."""


def chunks(ids: Iterable[str], size: int = MAX_IDS_PER_QUERY) -> Iterator[list[str]]:
    """The distinct ids, sorted, in parts that fit a statement; results of the parts in turn are sorted too."""
    ordered = sorted(set(ids))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def portions(
    items: Iterable[T], weight: Callable[[T], int], max_weight: int, max_items: float = math.inf
) -> Iterator[list[T]]:
    """The items, in parts of at most this weight and number; one that is heavier by itself is a part of its own."""
    portion: list[T] = []
    total = 0
    for item in items:
        more = weight(item)
        if portion and (len(portion) >= max_items or total + more > max_weight):
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += more
    if portion:
        yield portion


def dump(value: Any, name: str) -> str:
    """JSON text; InputError that names the field where the value is not JSON."""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InputError(f"{name}: expected JSON: {error}") from None


def text(value: str | None) -> str | None:
    """Text that any database takes: what a program printed may hold halves of characters and NULs."""
    if value is None or (value.isascii() and "\0" not in value):
        return value
    return value.encode("utf-8", "replace").decode().replace("\0", "�")


def scalar(hint: Any) -> tuple[type | None, bool]:
    """str, int, float or bool where a field of this type holds one (None: it is nested), and whether it may be None."""
    inner = [each for each in typing.get_args(hint) if each is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return str, False
    if type(None) in typing.get_args(hint):
        return scalar(inner[0])[0], True
    return (hint if hint in (str, int, float, bool) else None), False


def _json_reader(hint: Any, optional: bool) -> Callable[[Any], Any]:
    read = orjson.loads if _is_plain_json(hint) else msgspec.json.Decoder(hint).decode
    return (lambda value: None if value is None else read(value)) if optional else read


def _is_plain_json(hint: Any) -> bool:
    """True where the value is JSON's own objects, lists and numbers: no dataclass and no tuple is made of them."""
    args = typing.get_args(hint)
    if hint in (str, int, float, bool, Any, type(None)) or typing.get_origin(hint) is typing.Literal:
        return True
    return typing.get_origin(hint) is not tuple and bool(args) and all(map(_is_plain_json, args))


def _finite_or_none(value: float) -> float | None:
    """SQLite has no NaN."""
    number = float(value)
    return number if math.isfinite(number) else None


def _nan_for_none(value: float | None) -> float:
    return math.nan if value is None else value


def _packed(code: str, name: str, numbers: Sequence[float]) -> bytes:
    try:
        return array(code, numbers).tobytes()
    except (TypeError, OverflowError) as error:
        raise InputError(f"{name}: expected {'32-bit integers' if code == 'i' else 'numbers'}: {error}") from None


def _unpacked(code: str, packed: bytes) -> list[Any]:
    numbers: array[Any] = array(code)
    numbers.frombytes(packed)
    return numbers.tolist()


class RecordCodec(Generic[T]):
    """Rows of one type of record, and records of rows."""

    def __init__(self, kind: type[T]) -> None:
        hints = typing.get_type_hints(kind)
        self._kind = kind
        self.names = tuple(field.name for field in fields(kind))  # type: ignore[arg-type]
        self._decoders: list[tuple[str, Callable[[Any], Any]]] = []
        terms: list[str] = []
        for name in self.names:
            plain, optional = scalar(hints[name])
            decode: Callable[[Any], Any] | None = None
            term = f"record.{name}"
            if code := ARRAYS.get((kind, name)):
                term, decode = f"_packed({code!r}, {name!r}, {term})", functools.partial(_unpacked, code)
            elif plain is None:
                decode = _json_reader(hints[name], optional)
                known = {dict: "{}", list: "[]"}.get(typing.get_origin(hints[name]))
                if known is not None:  # as most of a call's fields are
                    term = f"{known!r} if {term} == {known} else dump({term}, {name!r})"
                else:
                    term = f"{'None if ' + term + ' is None else ' if optional else ''}dump({term}, {name!r})"
            elif (kind, name) == (Metric, "value"):
                term, decode = f"_finite_or_none({term})", _nan_for_none
            elif plain is bool:
                decode = bool  # SQLite has none: prepared statements return 0 and 1
            elif name in PRINTED.get(kind, ()):
                term = f"text({term})"
            if decode is not None:
                self._decoders.append((name, decode))
            terms.append(term)
        # As dataclasses do: a function written for this record takes a third of what a loop over its fields does.
        self.row: Callable[[T], Row] = eval(f"lambda record: ({', '.join(terms)},)", globals())
        """The values of the fields of a record, in their order, as databases keep them."""

    def columns(self, record: T) -> dict[str, Any]:
        """The same by name."""
        return dict(zip(self.names, self.row(record), strict=True))

    def record(self, columns: Mapping[str, Any]) -> T:
        """The record of values by name; those that are absent have their defaults."""
        values = dict(columns)
        for name, decode in self._decoders:
            if name in values:
                values[name] = decode(values[name])
        return self._kind(**values)

    def of_row(self, row: Iterable[Any]) -> T:
        """The record of a row; the last fields may be absent."""
        return self.record(dict(zip(self.names, row, strict=False)))


CALLS, SPANS, REWARDS, METRICS = RecordCodec(Call), RecordCodec(Span), RecordCodec(Reward), RecordCodec(Metric)
RUNS, ROLLOUTS, RESOURCES = RecordCodec(Run), RecordCodec(Rollout), RecordCodec(Resource)
CONSUMED, CREDIT = RecordCodec(Consumed), RecordCodec(CallCredit)
read_retry = msgspec.json.Decoder(RetryPolicy).decode


def call_row(call: Call) -> Row:
    if len(call.logprobs) != len(call.sampled_ids):
        raise InputError(
            f"logprobs: expected one for each of {len(call.sampled_ids)} sampled_ids of call {call.id}, "
            f"got {len(call.logprobs)}"
        )
    if not math.isfinite(sum(call.logprobs)):
        raise InputError(f"logprobs: expected finite numbers, call {call.id} has others")
    return CALLS.row(call)


def credit_row(credit: CallCredit) -> Row:
    numbers = credit.credit, credit.advantage, credit.return_ or 0.0, credit.weight, credit.clip_share or 0.0
    if not all(map(math.isfinite, numbers)):
        raise InputError(f"credit: expected finite numbers, that of call {credit.call_id} has others")
    return CREDIT.row(credit)


def encode_calls(calls: Iterable[Call]) -> bytes:
    """MessagePack of the rows of calls: token ids and logprobs are four bytes each."""
    return msgspec.msgpack.encode([CALLS.row(call) for call in calls])


def decode_calls(packed: bytes) -> list[Call]:
    """The calls that `encode_calls` was given; ValueError for other bytes."""
    try:
        return [CALLS.of_row(row) for row in msgspec.msgpack.decode(packed, type=list[Row])]
    except TypeError as error:  # a row that lacks fields, or has one of another type
        raise ValueError(f"expected the fields of a call: {error}") from None


def new_rollout(new: NewRollout, rollout_id: str, now_ns: int) -> Rollout:
    """The rollout that a store makes of it."""
    named = {field.name: getattr(new, field.name) for field in fields(new)}
    return Rollout(id=rollout_id, state="queued", attempt=0, lost=0, created_ns=now_ns, **named)
