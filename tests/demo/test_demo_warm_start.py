"""The warm start: what it trains on, how it paces itself, what it leaves."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.demo import imitation, tasks, tiny_model, warm_start


def test_only_what_the_assistant_writes_is_trained_its_end_token_included():
    demos, _ = tasks.demonstrations(tasks.load("lookup"), 50, seed=0)
    tokenizer = tiny_model.train_tokenizer(
        [message["content"] for demo in demos for message in demo], ("<find>", "</find>"), 400
    )
    demo = [
        {"role": "user", "content": "Where does Ana live?"},
        {"role": "assistant", "content": "<find>Ana city</find>"},
        {"role": "user", "content": "Oslo"},
        {"role": "assistant", "content": "Answer: Oslo"},
    ]

    tokens, mask = imitation.encode(tokenizer, demo)

    trained = tokenizer.decode([token for token, sampled in zip(tokens, mask, strict=True) if sampled])
    assert trained == "<find>Ana city</find><|end|>Answer: Oslo<|end|>"
    assert tokenizer.decode(tokens).startswith("<|user|>Where does Ana live?<|end|><|assistant|><find>")


def test_the_weights_of_a_batch_sum_to_one_over_its_trained_tokens():
    batch = [([5, 6, 7], [False, True, True]), ([5, 6, 7, 8], [False, False, True, True])]

    sequences = imitation.to_sequences(batch)

    assert [sequence.weights for sequence in sequences] == [[0, 0.25, 0.25], [0, 0, 0.25, 0.25]]


def test_every_demonstration_is_seen_once_before_any_is_seen_twice():
    rows = [([index], [True]) for index in range(2 * imitation.BATCH)]
    chosen = list(islice(imitation.batches(rows, 0), 4))

    first, second = sorted(chosen[0] + chosen[1]), sorted(chosen[2] + chosen[3])
    assert first == second == rows
    assert chosen[:2] != chosen[2:]


def test_the_learning_rate_warms_up_stays_and_falls_to_a_tenth():
    settings = imitation.Imitation(steps=200, learning_rate=1.0)
    rates = [settings.rate(step) for step in range(200)]

    assert rates[:20] == [pytest.approx((step + 1) / 20) for step in range(20)]
    assert set(rates[20:100]) == {1.0}
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == 0.1


@pytest.mark.slow
def test_a_warm_start_leaves_a_model_that_has_begun_to_imitate_and_is_the_same_for_a_seed(tmp_path: Path):
    reports: list[dict[str, float]] = []

    facts = warm_start.warm_start(
        "lookup", tmp_path / "a", seed=0, threads=1, report=reports.append, steps=20, count=200
    )

    assert [(report["step"], report["of"]) for report in reports] == [(10, 20), (20, 20)]
    assert reports[-1]["loss"] < reports[0]["loss"] - 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert sum(parameter.numel() for parameter in model.parameters()) == facts["parameters"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == model.config.vocab_size
    assert 0.15 < facts["demonstrator"] < 0.45
    warm_start.warm_start("lookup", tmp_path / "b", seed=0, threads=1, report=lambda _: None, steps=20, count=200)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
