"""The tiny tokenizer and model: exact prefixes, exact text, an ordinary transformers folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.demo import tasks, tiny_model
from agentlightning.demo.tasks import DemoTask

TASKS = [pytest.param(tasks.load(name), id=name) for name in tasks.NAMES]


def texts_of(task: DemoTask, count: int = 600) -> list[str]:
    return [message["content"] for demo in tasks.demonstrations(task, count, seed=0)[0] for message in demo]


def encode(tokenizer, messages, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@pytest.fixture(scope="module")
def sql_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    task = tasks.load("sql")
    tiny_model.build(folder, texts_of(task), special_words=task.SPECIAL_WORDS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(sql_folder: Path):
    return AutoTokenizer.from_pretrained(sql_folder)


@pytest.mark.parametrize(("name", "low", "high"), [("sql", 46, 56), ("lookup", 24, 29)])
def test_messages_encode_alone_as_they_do_together_and_are_short(name: str, low: int, high: int):
    task = tasks.load(name)
    tokenizer = tiny_model.train_tokenizer(texts_of(task), task.SPECIAL_WORDS, 400)
    demos, _ = tasks.demonstrations(task, 200, seed=9)
    whole = [encode(tokenizer, demo) for demo in demos]

    assert whole == [[i for message in demo for i in encode(tokenizer, [message])] for demo in demos]
    assert low < sum(map(len, whole)) / len(whole) < high


def test_a_later_prompt_begins_with_the_earlier_prompt_and_what_was_sampled(tokenizer):
    question = {"role": "user", "content": "How many people work in Oslo?"}
    answer, reply = {"role": "assistant", "content": "<sql>.schema</sql>"}, {"role": "user", "content": "staff name"}
    prompt = encode(tokenizer, [question], add_generation_prompt=True)
    sampled = [*tokenizer.encode(answer["content"]), tokenizer.eos_token_id]

    later = encode(tokenizer, [question, answer, reply], add_generation_prompt=True)

    assert later[: len(prompt) + len(sampled)] == prompt + sampled


def test_digits_are_single_tokens_and_tool_tags_are_one_each(tokenizer):
    assert len(tokenizer.encode("1234567890")) == 10
    assert len(tokenizer.encode("<sql></sql>")) == 2


def test_the_folder_loads_as_a_transformers_model_of_the_stated_size(sql_folder: Path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(sql_folder)

    assert 170_000 < sum(parameter.numel() for parameter in model.parameters()) < 190_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 512


def test_the_seed_alone_decides_the_weights_and_torch_keeps_its_own_state(tmp_path: Path):
    before = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tiny_model.build(tmp_path / name, ["some text"], hidden=16, layers=1, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")

    assert a == b
    assert a != c
    assert torch.equal(before, torch.random.get_rng_state())
