"""What a sample of rollouts shows by itself is said, with what to change."""

from typing import Any

import pytest

import build
from agentlightning.records import Call, Rollout
from agentlightning.trainer.causes import Sample, causes


def sample(rollouts: dict[str, Any], calls: dict[str, Any], **fields: Any) -> Sample:
    """Four rollouts of different tasks, alike but for what is given; a tuple has a value for each."""
    made: list[Rollout] = []
    asked: list[Call] = []
    for number in range(4):
        one = {name: value[number] if isinstance(value, tuple) else value for name, value in rollouts.items()}
        call = {name: value[number] if isinstance(value, tuple) else value for name, value in calls.items()}
        made.append(build.rollout(**{"id": f"r{number}", "state": "succeeded", "reward": 0.5} | one))
        messages = [{"role": "user", "content": f"task {number}"}]
        said = {"role": "assistant", "content": f"completion {number}"}
        place = build.rollout(id=f"r{number}", attempt=1)
        asked.append(build.call(place, **{"id": f"c{number}", "messages": messages, "completion": said} | call))
    return Sample(rollouts=made, calls=asked, **fields)


CUT = {"finish_reason": "length", "sampled_ids": [7] * 16}
SAID = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (sample({}, CUT), "every completion was cut by max_tokens = 16: raise the agent's max_tokens, or ask for"),
        (sample({}, CUT, max_tokens=16), "every completion was cut by max_tokens = 16: raise model.max_tokens, or"),
        (
            sample({}, CUT | {"finish_reason": ("length", "length", "stop", "stop")}),
            "2 of 4 completions were cut by max",
        ),
        (
            sample({}, CUT | {"sampled_ids": ([7] * 3, [7], [7], [7])}),
            "every completion was cut by the end of the context",
        ),
        (sample({}, {"completion": SAID}), "every completion was empty: the model ends at once"),
        (
            sample({}, {"tools": [{"type": "function"}]}),
            "no completion calls a tool, though every rollout offered some",
        ),
        (
            sample({}, {"messages": [SAID]}),
            "all 4 rollouts begin with the same prompt: does the agent put its task into",
        ),
        (sample({}, {"completion": SAID | {"content": "No."}}), "all 4 rollouts end with the same completion, 'No.': "),
        (
            sample({}, {"overridden_params": {"temperature": 0.7}}),
            "the agent's temperature not applied: a training run",
        ),
        (
            sample({"state": ("failed", *["succeeded"] * 3), "error": "Traceback\nKeyError: 'x'"}, {}),
            "1 of 4 rollouts fai",
        ),
        (sample({"reward": None}, {}), "every rollout ended without a reward, which counts as 0"),
        (sample({}, {}), None),
        (sample({}, {"finish_reason": ("length", "stop", "stop", "stop")}), None),
    ],
)
def test_each_cause_is_said_alone(given: Sample, sentence: str | None) -> None:
    found = causes(given)
    assert len(found) == (sentence is not None)
    assert all(one.startswith(sentence or "") for one in found)
