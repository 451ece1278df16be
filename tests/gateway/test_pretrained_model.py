"""A real model behind the gateway: its tokenizer, its chat template and its weights, with the demo's agent as the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from gateway_house import House

from agentlightning.config.engine import EngineConfig
from agentlightning.demo import word_problems
from agentlightning.demo.tasks import rows
from agentlightning.engines.local.sampler import create_app, open_sampler
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.sql.store import InMemoryLightningStore


@pytest.fixture
async def served(pretrained: Path) -> AsyncIterator[House]:
    """A gateway whose engine is a sampler with the pretrained model, in this process."""
    sampler = open_sampler(pretrained, EngineConfig(device="cpu", dtype="bfloat16", max_num_seqs=4))
    app = create_app(sampler, weights_key="of-the-engine", weights_folder=pretrained.parent)
    async with TestServer(app) as server, InMemoryLightningStore() as store:
        engine: Any = SimpleNamespace(url=str(server.make_url("")).rstrip("/"))
        house = await House(store, engine, Renderer(pretrained), pretrained).start()
        yield house
        await house.close()


async def test_the_calls_of_an_agent_on_a_real_model_are_recorded_as_the_template_renders_them(served: House) -> None:
    from transformers import AutoTokenizer

    claim = await served.claim()
    row = {
        "question": "There are 24 seats in the hall, and 4 people are sitting. How many seats are empty?",
        "answer": 20,
    }
    await word_problems.solve(row, SimpleNamespace(model="policy"), served.openai(claim))

    calls = await served.store.calls([claim.rollout.id])
    assert calls
    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    ids: list[int] = []
    messages: list[Any] = []
    for call in calls:
        assert call.fork_cause is None
        assert len(call.sampled_ids) == len(call.logprobs) > 0
        ids += call.suffix_ids
        messages += call.messages
        written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == written
        assert len(ids) == call.prompt_tokens
        ids += call.sampled_ids
        messages.append(call.completion)


def test_a_conversation_is_rendered_and_parsed_to_the_ids_of_transformers_over_turns(pretrained: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, renderer = AutoTokenizer.from_pretrained(pretrained), Renderer(pretrained)
    for row in rows(word_problems, "test", 10, 0):
        messages = word_problems.opening(row["question"])
        for result in ("= 12", "= 3.5", "= -7"):
            prompt = renderer.encode(renderer.render(messages, None, True))
            assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            completion = {"role": "assistant", "content": f"It is {result[2:]}, so 12 - 2 {result}?\nYes."}
            sampled = renderer.completion_ids(prompt, messages, None, completion)
            assert sampled is not None
            said, end = renderer.split_end(sampled)
            assert renderer.decode(said) == completion["content"]
            assert end in renderer.end_ids
            messages += [completion, {"role": "user", "content": result}]
            whole = renderer.encode(renderer.render(messages, None, True))
            assert whole[: len(prompt) + len(sampled)] == prompt + sampled
