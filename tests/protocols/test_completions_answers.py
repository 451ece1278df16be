"""Answers of OpenAI Completions: whole and streamed; and those of external models."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai import types
from random_requests import cut

from agentlightning.protocols import completions
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    EventReader,
    TokenLogprob,
)


def parse(**given: Any) -> CompletionRequest:
    return completions.parse({"prompt": "hi", **given})


def answer(*choices: Choice) -> Completion:
    return Completion(call_id="1", model="m", created_s=5, prompt_tokens=3, choices=choices)


def events(data: bytes) -> list[Any]:
    return [json.loads(one) if one != b"[DONE]" else "[DONE]" for one in EventReader().feed(data)]


def likeliest(*others: tuple[str, float]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(text=text, logprob=logprob) for text, logprob in others)


def test_logprobs_have_the_older_shape() -> None:
    tokens = (
        TokenLogprob(text="ab", logprob=-0.5, top=likeliest(("ab", -0.5), ("c", -1.0), ("c", -2.0))),
        TokenLogprob(text="d", logprob=-3.0, top=likeliest(("e", -0.1))),
    )
    body = json.loads(completions.body(parse(), answer(Choice(content="abd", logprobs=tokens))))
    types.Completion.model_validate(body)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["ab", "d"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"ab": -0.5, "c": -1.0}, {"e": -0.1, "d": -3.0}],
        "text_offset": [0, 2],
    }


said = st.builds(
    lambda tokens, finish: Choice(
        content="".join(tokens),
        finish_reason=finish,
        sampled_tokens=len(tokens),
        logprobs=tuple(TokenLogprob(text=token, logprob=-1.0) for token in tokens),
    ),
    st.lists(st.text(max_size=3), max_size=4),
    st.sampled_from(["stop", "length"]),
)


@given(choices=st.lists(said, min_size=1, max_size=3), last=st.booleans())
def test_a_stream_put_together_is_the_whole_body(choices: list[Choice], last: bool) -> None:
    request = parse(n=len(choices), stream=True, stream_options={"include_usage": True}, logprobs=0)
    stream = completions.stream(request, "1", "m", 5, 3)
    data = [stream.first()]
    for index, choice in enumerate(choices):
        tokens = choice.logprobs or ()
        for at, token in enumerate(tokens, 1):
            delta = Delta(content=token.text, logprobs=(token,), last=last and at == len(tokens))
            data.append(stream.delta(index, delta))
    data.append(stream.last(answer(*choices)))
    *parts, counts, end = events(b"".join(data))
    whole = json.loads(completions.body(request, answer(*choices)))
    types.Completion.model_validate(whole)
    assert (counts["usage"], counts["choices"], end) == (whole["usage"], [], "[DONE]")
    for expected in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == expected["index"]]
        assert "".join(part["text"] for part in mine) == expected["text"]
        assert mine[-1]["finish_reason"] == expected["finish_reason"]
        for name, values in expected["logprobs"].items():
            assert [value for part in mine if part["logprobs"] for value in part["logprobs"][name]] == values


def test_a_failed_stream_carries_the_error() -> None:
    stream = completions.stream(parse(stream=True), "1", "m", 5, 3)
    (part,) = events(stream.failed(ApiError("gone")))
    assert part["error"]["message"] == "gone"


@given(choice=said)
def test_a_reader_finds_the_same_text_in_a_whole_answer_and_in_its_chunks(choice: Choice) -> None:
    request = parse(stream=True, stream_options={"include_usage": True})
    stream = completions.stream(request, "1", "m", 5, 3)
    deltas = [stream.delta(0, Delta(content=part)) for part in cut(choice.content or "", 2)]
    whole, parts = completions.reader(), completions.reader()
    whole.whole(json.loads(completions.body(request, answer(choice))))
    for part in events(b"".join([*deltas, stream.last(answer(choice))]))[:-1]:
        parts.event(part)
    for one in (whole, parts):
        assert one.message == {"role": "assistant", "content": choice.content}
        assert (one.finish_reason, one.prompt_tokens) == (choice.finish_reason, 3)
        assert one.sampled_tokens == choice.sampled_tokens
