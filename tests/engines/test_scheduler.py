"""Continuous batching: whatever joins and leaves, a request gets the tokens it would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.engines.local.decoder import Decoder, open_decoder
from agentlightning.engines.local.scheduler import PrefixCache, SamplingRequest, Scheduler, score_prompt


def scheduler(decoder: Decoder, **changes: Any) -> Scheduler:
    return Scheduler(
        decoder, **{"max_num_seqs": 8, "decode_text": lambda ids: "".join(chr(31 + i) for i in ids), **changes}
    )


def requests(n: int, **changes: Any) -> list[SamplingRequest]:
    chance = random.Random(1)
    return [
        SamplingRequest(
            prompt=[chance.randrange(2, 64) for _ in range(chance.randrange(1, 90))],
            max_tokens=chance.randrange(1, 40),
            seed=seed,
            stop_ids=frozenset([1]),
            **changes,
        )
        for seed in range(n)
    ]


def drain(scheduler: Scheduler, waiting: list[SamplingRequest], burst: int = 3) -> None:
    """Requests arrive a few at a time."""
    waiting = list(waiting)
    while waiting or scheduler.busy:
        for _ in range(min(burst, len(waiting))):
            scheduler.submit(waiting.pop())
        scheduler.turn()


def alone(decoder: Decoder, request: SamplingRequest) -> SamplingRequest:
    twin = SamplingRequest(
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop_ids=request.stop_ids,
        temperature=request.temperature,
    )
    drain(scheduler(decoder), [twin])
    return twin


def assert_same(found: SamplingRequest, expected: SamplingRequest) -> None:
    assert (found.sampled, found.finish) == (expected.sampled, expected.finish)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-5)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_crowd_changes_nobody_s_tokens(build: Callable[..., Path], family: str) -> None:
    decoder = open_decoder(build(family))
    crowd = requests(30)
    drain(scheduler(decoder), crowd)
    for request in crowd:
        assert_same(request, alone(decoder, request))


def test_rows_that_outgrow_the_memory_wait_and_go_on_with_the_same_noise(llama: Path) -> None:
    decoder = open_decoder(llama)
    crowd = requests(12)
    drain(scheduler(decoder, cache_bytes=int(2.5 * 64 * decoder.row_bytes * 5 / 4)), crowd)
    for request in crowd:
        assert_same(request, alone(decoder, request))


def test_the_next_turn_of_a_conversation_and_equal_prompts_get_the_logprobs_of_a_fresh_prefill(llama: Path) -> None:
    decoder = open_decoder(llama)
    shared = scheduler(decoder)
    first = [SamplingRequest(prompt=[5, 6, 7, 8, 9, 10], max_tokens=9, seed=seed) for seed in range(8)]
    drain(shared, first, burst=8)
    second = [
        SamplingRequest(prompt=r.prompt + r.sampled + [11, 12, 13], max_tokens=9, seed=r.seed + 100, temperature=0.7)
        for r in first
    ]
    drain(shared, second, burst=8)
    for request in first + second:
        assert_same(request, alone(decoder, request))


class Counting:
    """A decoder that notes how many prompt tokens it was given to read, padding included."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.read_tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def extend(self, first: int, tokens_BM: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        self.read_tokens += tokens_BM.numel() if tokens_BM.shape[1] > 1 else 0
        return self._decoder.extend(first, tokens_BM, *others)


@pytest.mark.parametrize("burst", [8, 1])
def test_the_prompt_of_a_group_is_read_once_whether_its_rollouts_come_together_or_one_by_one(
    build: Callable[..., Path], burst: int
) -> None:
    decoder = Counting(open_decoder(build("Llama", max_position_embeddings=1024)))
    prompts = [[2 + (i * k) % 61 for i in range(400)] for k in (3, 5)]
    crowd = [SamplingRequest(prompt=prompts[i // 4], max_tokens=6, seed=i) for i in range(8)]
    drain(scheduler(decoder), crowd[::-1], burst=burst)
    assert decoder.read_tokens == sum(map(len, prompts))
    for request in crowd:
        assert_same(request, alone(decoder, request))


def test_the_turns_of_a_conversation_read_only_what_is_new(llama: Path) -> None:
    decoder = Counting(open_decoder(llama))
    shared = scheduler(decoder)
    request = SamplingRequest(prompt=list(range(2, 62)), max_tokens=9, seed=1)
    drain(shared, [request])
    for turn in range(3):
        before = decoder.read_tokens
        longer = request.prompt + request.sampled + [11, 12, 13, 14]
        request = SamplingRequest(prompt=longer, max_tokens=9, seed=turn)
        drain(shared, [request])
        # the answer's last token was sampled and never read
        assert decoder.read_tokens - before == 5
        assert_same(request, alone(decoder, request))


def test_prompts_longer_than_a_chunk_give_the_tokens_of_transformers(build: Callable[..., Path]) -> None:
    folder = build("Llama", max_position_embeddings=2048)
    decoder = open_decoder(folder)
    prompts = [[2 + (i * i + k) % 62 for i in range(n)] for k, n in enumerate((1100, 700, 20))]
    crowd = [SamplingRequest(prompt=p, max_tokens=4, temperature=0.0) for p in prompts]
    drain(scheduler(decoder), crowd)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for request in crowd:
        ids = torch.tensor([request.prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=-1
        )
        assert request.sampled == expected[0, len(request.prompt) :].tolist()


def test_new_weights_serve_from_the_next_token_and_each_token_is_stamped(llama: Path, other_llama: Path) -> None:
    running = scheduler(open_decoder(llama))
    request = SamplingRequest(prompt=[4, 5, 6], max_tokens=10, seed=3)
    running.submit(request)
    for _ in range(3):
        running.turn()
    before = list(request.sampled)
    running.load(other_llama, "1")
    drain(running, [])
    assert request.sampled[: len(before)] == before
    assert request.versions == [("0", 0), ("1", len(before))]


def test_a_stop_string_over_several_tokens_ends_the_answer_and_is_named(llama: Path) -> None:
    decoder = open_decoder(llama)
    free = SamplingRequest(prompt=[4, 5, 6], max_tokens=30, seed=5)
    drain(scheduler(decoder), [free])
    stop = "".join(chr(31 + i) for i in free.sampled[10:13])
    text = "".join(chr(31 + i) for i in free.sampled)
    stopped = SamplingRequest(prompt=[4, 5, 6], max_tokens=30, seed=5, stops=("\x00", stop))
    drain(scheduler(decoder), [stopped])
    assert len(stopped.sampled) == text.index(stop) + len(stop)
    assert (stopped.finish, stopped.stop_reason) == ("stop", stop)


def test_logits_that_are_not_finite_end_the_request_as_an_error(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    request = SamplingRequest(prompt=[4, 5], max_tokens=5)
    drain(scheduler(open_decoder(tmp_path)), [request])
    assert request.finish == "error"


def test_the_prefix_cache_finds_the_longest_entry_and_forgets_the_least_recently_used() -> None:
    def ids(*values: int) -> bytes:
        return b"".join(v.to_bytes(4, "little") for v in values)

    cache = PrefixCache(limit=25)
    cache.put(ids(1, 2), "short", 10)
    cache.put(ids(1, 2, 3), "long", 10)
    assert cache.longest(ids(1, 2, 3, 4)) == (3, "long")
    assert cache.longest(ids(1, 2, 3)) == (2, "short")
    assert cache.longest(ids(2, 2, 3, 4)) == (0, None)
    cache.put(ids(7), "new", 10)
    assert cache.longest(ids(1, 2, 3, 4)) == (2, "short")
    cache.put(ids(8), "too large", 26)
    assert cache.longest(ids(8, 9)) == (0, None)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_scores_are_the_models_log_softmax_also_of_prompts_read_in_pieces(
    build: Callable[..., Path], family: str
) -> None:
    folder = build(family)
    decoder = open_decoder(folder)
    decoder.reserve(1, 64)
    ids = [3 + at * 7 % 50 for at in range(40)]
    found, last = score_prompt(decoder, 0, ids, 2, "cpu", max_logits=16 * decoder.vocab)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0].float()
    logprobs = logits.log_softmax(-1)
    assert len(found) == len(ids) - 1
    assert torch.allclose(last, logits[-1:], atol=2e-4)
    for at, (own, *top) in enumerate(found):
        row = logprobs[at]
        assert own[0] == ids[at + 1]
        assert own[1] == pytest.approx(float(row[own[0]]), abs=2e-4)
        assert own[2] == int((row > row[own[0]]).sum()) + 1
        assert [(index, rank) for index, _, rank in top] == [
            (int(index), rank) for rank, index in enumerate(row.topk(2).indices, 1)
        ]


def test_what_was_kept_of_old_weights_is_not_used_under_new_ones(llama: Path, other_llama: Path) -> None:
    running = scheduler(open_decoder(llama))
    first = SamplingRequest(prompt=[4, 5, 6], max_tokens=10, seed=3)
    drain(running, [first])
    running.load(other_llama, "1")
    second = SamplingRequest(prompt=first.prompt + first.sampled + [9], max_tokens=8, seed=4)
    drain(running, [second])
    assert_same(second, alone(open_decoder(other_llama), second))


def test_a_cancelled_request_frees_its_row_and_harms_nobody(llama: Path) -> None:
    decoder = open_decoder(llama)
    running = scheduler(decoder)
    crowd = requests(6)
    for request in crowd:
        running.submit(request)
    running.turn()
    crowd[0].cancelled = True
    running.turn()
    assert running.counts[0] <= 5
    drain(running, [])
    assert crowd[0].finish is None or len(crowd[0].sampled) <= 2
    for request in crowd[1:]:
        assert_same(request, alone(decoder, request))


def test_a_scored_prompt_gives_the_tokens_that_it_gives_unscored(llama: Path) -> None:
    decoder = open_decoder(llama)
    crowd = requests(12)
    for request in crowd[::3]:
        request.prompt_alternatives = 1
    drain(scheduler(decoder), crowd)
    for request in crowd:
        assert_same(request, alone(decoder, request))
        assert (request.prompt_scores is None) == (request.prompt_alternatives is None)
        if request.prompt_scores is not None:
            assert [scores[0][0] for scores in request.prompt_scores] == request.prompt[1:]
