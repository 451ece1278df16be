"""Images over a real vLLM server: exact prefixes with its placeholders, and the learner's log-probabilities."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tiny_llava import picture
from vllm_house import VllmServer, open_house, prompts

from agentlightning.engines.local.learner import Learner
from agentlightning.records import Call
from agentlightning.rendering.images import image_hash
from agentlightning.training_types import ImageInput, TrainingSequence
from build import learner_setup

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]


async def test_a_conversation_with_pictures_is_exact_and_the_learner_agrees(seeing_server: VllmServer) -> None:
    files = {image_hash(data): data for data in map(picture, (0, 90, 250))}
    async with open_house(seeing_server, "generate", None, images=True) as house:
        claim = await house.claim()
        client = house.openai(claim).chat.completions
        messages: list[Any] = [{"role": "user", "content": "look"}]
        for data in files.values():
            reply = await client.create(model="policy", messages=messages, max_tokens=4)
            url = "data:image/png;base64," + base64.b64encode(data).decode()
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it ?"}]
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
            messages += [{"role": "user", "content": parts}]
        await client.create(model="policy", messages=messages, max_tokens=4)
        calls = await house.calls(claim)
    assert [call.continuation for call in calls] == ["first_turn", *["continued"] * 3]
    full, learner = prompts(calls), Learner(seeing_server.models[0], learner_setup())
    images: list[ImageInput] = []
    for call in calls:
        prompt, before = full[call.id], len(full[call.id]) - len(call.suffix_ids)
        images += [
            ImageInput(hash=one.hash, start=before + one.start, end=before + one.end, data=files[one.hash])
            for one in call.images
        ]
        [found] = learner.logprobs([row(prompt, call, images)])
        assert found[len(prompt) :] == pytest.approx(call.logprobs, abs=1e-4)
    assert [image.hash for image in images] == list(files)


def row(prompt: list[int], call: Call, images: list[ImageInput]) -> TrainingSequence:
    mask = [False] * len(prompt) + [True] * len(call.sampled_ids)
    numbers = [float(one) for one in mask]
    return TrainingSequence(
        rollout_id="r",
        tokens=[*prompt, *call.sampled_ids],
        mask=mask,
        logprobs=[0.0] * len(mask),
        advantages=numbers,
        weights=numbers,
        segments=[(len(prompt), len(mask))],
        decodings=[call.decoding],
        images=list(images),
    )
