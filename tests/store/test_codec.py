"""Rows of records: what is written is read back, whatever the form and however old the row."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

import build
from agentlightning.errors import InputError
from agentlightning.records import Call, Metric, Sampling, VersionSpan
from agentlightning.store import wire
from agentlightning.store.codec import CALLS, METRICS, call_row, decode_calls, encode_calls


def a_full_call() -> Call:
    return build.call(
        sampled_ids=[1, -2, 2**31 - 1],
        logprobs=[-0.5, -0.25, 0.0],
        versions=[VersionSpan(version=3, start=0, end=3)],
        sampling=Sampling(temperature=0.5, max_tokens=7),
        tools=[{"type": "function"}],
        overridden_params={"temperature": 0.1},
        usage={"prompt_tokens": 3},
        untrained_tokens=4,
        delivered=False,
        decoding={"logits": {"top_k": 5}},
    )


def test_calls_are_the_same_after_their_binary_form() -> None:
    call = a_full_call()
    bare = replace(call, tools=None, overridden_params={}, agent=None, span_id=None, decoding={})
    assert decode_calls(encode_calls([call, bare])) == [call, bare]
    assert decode_calls(encode_calls([])) == []


def test_ids_and_logprobs_take_four_bytes_each() -> None:
    call = a_full_call()
    longer = replace(call, sampled_ids=[7] * 10_000, logprobs=[-0.5] * 10_000)
    assert 80_000 < len(encode_calls([longer])) < 82_000


def test_a_row_that_lacks_fields_is_bad_input() -> None:
    packed = msgspec.msgpack.encode([CALLS.row(a_full_call())[:5]])
    with pytest.raises(InputError, match="calls: expected the fields of a call"):
        wire.decode_arguments("append_calls", wire.encode({"calls": [packed]}, "calls"))


def test_messages_that_are_no_json_are_named() -> None:
    with pytest.raises(InputError, match="messages: expected JSON"):
        call_row(replace(a_full_call(), messages=[{"x": object()}]))


def test_a_metric_that_is_no_finite_number_is_kept_as_none() -> None:
    metric = Metric(run_id="r", step=1, name="loss", value=math.inf)
    row = METRICS.row(metric)
    assert row[3] is None
    assert math.isnan(METRICS.of_row(row).value)
