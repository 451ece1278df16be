"""Grammars, penalties and cuts: the sampler's distribution, and the learner's, which is the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from toy_model import write_tokenizer
from transformers import AutoModelForCausalLM

from agentlightning.adapters.sequences import merge
from agentlightning.config.engine import EngineConfig
from agentlightning.engines.local.decoding import LogitRule, TokenHistory, adjusted
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.sampler import Sampler, open_sampler
from agentlightning.errors import EngineError, InputError
from agentlightning.records import JSON
from agentlightning.rendering.grammar import Grammars, structured_outputs
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TrainingSequence, Transition
from build import learner_setup, linked, transition

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F", "K"]}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["unit", "n"],
    "additionalProperties": False,
}
GRAMMAR: JSON = {"structured_outputs": {"json": SCHEMA}}
PENALTIES: JSON = {
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.3,
    "logit_bias": {"40": 1.5, "41": -3},
}
BOUNDS: JSON = {"min_tokens": 12, "stop_token_ids": [40, 5000], "allowed_token_ids": [2, *range(38, 60)]}
CUTS: JSON = {"top_k": 12, "min_p": 0.05, "top_p": 0.9}
PROMPT = [20, 30, 40, 50]


@pytest.fixture(scope="module")
def folder(build: Callable[..., Path]) -> Path:
    """A tiny model whose tokenizer knows bytes."""
    made = build("Llama", seed=3, vocab_size=352, eos_token_id=2)
    (made / "generation_config.json").unlink(missing_ok=True)
    return write_tokenizer(made)


@pytest.fixture(scope="module")
def sampler(folder: Path) -> Sampler:
    return open_sampler(folder, EngineConfig(device="cpu"))


def sampled(
    sampler: Sampler, seed: int = 0, prompt: list[int] = PROMPT, **params: Any
) -> tuple[list[int], list[float]]:
    given = {"temperature": 0.8, "max_tokens": 40, "seed": seed, **params}
    body = json.dumps({"token_ids": prompt, "sampling_params": given}).encode()
    _, request = sampler.parse(body)
    sampler.scheduler.submit(request)
    while request.finish is None:
        sampler.scheduler.turn()
    assert request.finish != "error", request.error
    return request.sampled, request.logprobs


def decoding(params: JSON) -> JSON:
    """What the gateway records of a call with these parameters."""
    logits = {name: value for name, value in params.items() if name != "structured_outputs"}
    wanted = params.get("structured_outputs")
    return {**({"grammar": structured_outputs(wanted)} if wanted else {}), **({"logits": logits} if logits else {})}


def row(calls: list[tuple[list[int], list[int], list[float], JSON]]) -> TrainingSequence:
    """One merged row of calls: (what precedes it, sampled ids, their logprobs, what was applied)."""
    tokens: list[int] = []
    logprobs: list[float] = []
    spans = []
    for before, ids, found, _ in calls:
        tokens += before
        logprobs += [0.0] * len(before)
        spans.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
        logprobs += found
    return sequence(tokens, spans, logprobs=logprobs, temperature=0.8, decodings=[one[3] for one in calls])


@pytest.mark.parametrize("params", [GRAMMAR, PENALTIES, CUTS, BOUNDS, {**GRAMMAR, **PENALTIES, **CUTS}])
@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
def test_the_learners_logprobs_are_those_that_the_sampler_recorded(
    sampler: Sampler, folder: Path, params: JSON, packing: Any
) -> None:
    rows = []
    for seed in range(4):
        ids, logprobs = sampled(sampler, seed, **params)
        plain_ids, plain = sampled(sampler, seed, [*PROMPT, *ids, 60, 61])
        rows.append(row([(PROMPT, ids, logprobs, decoding(params)), ([60, 61], plain_ids, plain, {})]))
    learner = Learner(folder, learner_setup(packing=packing, reference=True))
    for found in (learner.logprobs(rows), learner.reference_logprobs(rows)):
        for one, values in zip(rows, found, strict=True):
            for expected, value, masked in zip(one.logprobs, values, one.mask, strict=True):
                assert not masked or value == pytest.approx(expected, abs=1e-5, rel=1e-5)


def test_what_was_sampled_follows_the_grammar_and_forced_tokens_have_probability_one(
    sampler: Sampler, folder: Path
) -> None:
    for seed in range(6):
        ids, logprobs = sampled(sampler, seed, **GRAMMAR)
        assert ids[-1] == 2
        answer = json.loads(text_of(folder, ids[:-1]))
        assert answer["unit"] in "CFK"
        assert 0 <= answer["n"] <= 999
        assert sum(logprob == 0.0 for logprob in logprobs) > len(ids) // 2


def test_of_several_end_tokens_the_tokenizers_own_ends_what_follows_a_grammar_and_is_forced(
    build: Callable[..., Path],
) -> None:
    made = build("Llama", seed=3, vocab_size=352, eos_token_id=[3, 2])
    (made / "generation_config.json").unlink()
    sampler = open_sampler(write_tokenizer(made), EngineConfig(device="cpu"))
    learner = Learner(made, learner_setup())
    for seed in range(10):
        ids, logprobs = sampled(sampler, seed, structured_outputs={"choice": ["yes"]})
        spec = structured_outputs({"choice": ["yes"]})
        assert (ids[-1], logprobs) == (2, [0.0] * len(ids))
        assert learner._grammars.forced(spec, ids, logprobs) == [[0, len(ids)]]
    for end in (2, 3):  # without a grammar each of them ends a completion
        assert sampled(sampler, allowed_token_ids=[end])[0] == [end]


def text_of(folder: Path, ids: list[int]) -> str:
    return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids))


def test_bounds_on_tokens_hold(sampler: Sampler) -> None:
    for seed in range(6):
        ids, _ = sampled(sampler, seed, **BOUNDS)
        assert set(ids) <= set(BOUNDS["allowed_token_ids"])
        assert len(ids) > 12
        assert not {2, 40} & set(ids[:12])
        past, _ = sampled(sampler, seed, ignore_eos=True, allowed_token_ids=[2, 41])
        assert len(past) == 40
        assert past.count(2) > 1
    with pytest.raises(InputError, match="min_tokens"):
        sampled(sampler, min_tokens=3, allowed_token_ids=[2])


def test_a_call_that_ended_before_its_min_tokens_is_refused(folder: Path) -> None:
    wrong = row([(PROMPT, [41, 2], [-1.0, -1.0], {"logits": {"min_tokens": 3}})])
    with pytest.raises(EngineError, match="rollout r: a call ended before its min_tokens"):
        Learner(folder, learner_setup()).logprobs([wrong])


def test_gradients_and_entropy_are_those_of_autograd_over_the_masked_softmax(sampler: Sampler, folder: Path) -> None:
    params = {**GRAMMAR, "logit_bias": {"40": 1.5}}
    ids, logprobs = sampled(sampler, 1, **params)
    [one] = [row([(PROMPT, ids, logprobs, decoding(params))])]
    learner = Learner(folder, learner_setup())
    metrics = learner.forward_backward([one], Loss(name="reinforce", entropy=0.1))
    found = {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}

    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(input_ids=torch.tensor([one.tokens])).logits[0]
    masks = learner._grammars.masks(decoding(params)["grammar"], ids)
    total, entropies, forced = torch.zeros(()), 0.0, 0
    for place, (token, words) in enumerate(zip(ids, masks, strict=True)):
        allowed = [t for t in range(342) if words[t >> 3] >> (t & 7) & 1]
        biased = torch.stack([logits[len(PROMPT) + place - 1, t] + (1.5 if t == 40 else 0.0) for t in allowed])
        distribution = torch.log_softmax(biased / 0.8, -1)
        entropy = -(distribution.exp() * distribution).sum()
        total = total - distribution[allowed.index(token)] - 0.1 * entropy
        entropies += float(entropy.detach())
        forced += len(allowed) == 1
    total.backward()
    assert forced > 0
    assert metrics["entropy"] == pytest.approx(entropies / len(ids), abs=1e-5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    for name, p in model.named_parameters():
        assert p.grad is None or torch.allclose(p.grad, found[name], atol=1e-5), name


@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
def test_forced_tokens_count_in_no_ratio_length_and_no_metric(sampler: Sampler, folder: Path, packing: Any) -> None:
    learner = Learner(folder, learner_setup(packing=packing))
    calls: list[Transition] = []
    for place, wanted in enumerate([GRAMMAR, {"structured_outputs": {"choice": ["sunny"]}}, GRAMMAR]):
        prompt = PROMPT if not calls else [60]
        before = calls[-1].prompt_ids + calls[-1].sampled_ids if calls else []
        ids, logprobs = sampled(sampler, place, [*before, *prompt], **wanted)
        applied = decoding(wanted)
        masks = learner._grammars.masks(applied["grammar"], ids)
        applied["forced"] = learner._grammars.forced(applied["grammar"], ids, logprobs)
        given = {"suffix_ids": prompt, "sampled_ids": ids, "logprobs": logprobs, "temperature": 0.8}
        calls.append(transition(f"c{place}", **given, decoding=applied, parent=calls[-1] if calls else None))
        assert calls[-1].mask == [sum(map(int.bit_count, mask)) > 1 for mask in masks]
    assert calls[1].trained_tokens == 0
    weights = [one / 2 for one in (1.0, 0.0, 1.0)]
    changed = [replace(call, logprobs=[p - 0.1 * (p != 0) for p in call.logprobs]) for call in calls]
    [row] = merge("r", linked(changed), [1.0] * 3, weights)
    metrics = learner.forward_backward([row], Loss(name="gspo", clip_high=10.0))
    trained = [calls[0].trained_tokens, calls[2].trained_tokens]
    assert metrics["tokens"] == sum(trained)
    # every trained token's ratio is e^.1, and so is the mean over its call; over forced ones too it would be less
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.1) - 1, abs=1e-4)
    assert metrics["loss"] == pytest.approx(-math.exp(0.1) * sum(trained) / 2, abs=1e-3)


def test_a_token_that_the_rebuilt_mask_forbids_is_named_with_both_versions(sampler: Sampler, folder: Path) -> None:
    ids, logprobs = sampled(sampler, 1, **GRAMMAR)
    applied = decoding(GRAMMAR)
    applied["grammar"] = {**applied["grammar"], "version": "0.1"}
    wrong = row([(PROMPT, [ids[1], *ids[1:]], logprobs, applied)])
    with pytest.raises(EngineError, match=r"rollout r: token 0 of a call .*llguidance 0\.1, .*rebuilt by 1\."):
        Learner(folder, learner_setup()).logprobs([wrong])


def test_a_cut_that_the_learner_would_have_made_elsewhere_is_counted_and_keeps_the_token(
    sampler: Sampler, folder: Path
) -> None:
    ids, logprobs = sampled(sampler, 1)
    learner = Learner(folder, learner_setup())
    metrics = learner.forward_backward([row([(PROMPT, ids, logprobs, decoding({"top_k": 1}))])], Loss())
    assert 0 < metrics["cut_mismatch"] <= 1
    same, own = sampled(sampler, 1, **CUTS)
    assert learner.forward_backward([row([(PROMPT, same, own, decoding(CUTS))])], Loss())["cut_mismatch"] == 0


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"top_k": -2}, "top_k"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(sampler: Sampler, params: JSON, named: str) -> None:
    with pytest.raises(InputError, match=named):
        sampled(sampler, **params)


def test_limits_that_leave_no_token_are_said_to_be_the_reason(sampler: Sampler) -> None:
    every = list(range(352))
    with pytest.raises(AssertionError, match="together leave no token"):
        sampled(sampler, min_tokens=1, stop_token_ids=every)


def test_a_tokenizer_that_grammars_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"red": 0, "<end>": 1}, unk_token="red")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="structured_outputs: not available with this model"):
        Grammars(tmp_path, [1]).matcher('start: "red"')


def test_penalties_and_cuts_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.0, 0.5]])
    given = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"3": 1.0}}
    history = TokenHistory([2])
    for token in (0, 0, 4, 1):  # the last one comes after this place
        history.add(token)
    rule = LogitRule(logits=given, place=3, history=history)
    # 0: 2 / 2 - .5 - 2 x .25; 2: -1 x 2; 3: 0 + 1; 4: .5 / 2 - .5 - .25
    assert adjusted(logits, [rule], [1.0]).tolist() == [[0.0, 1.0, -2.0, 1.0, -0.5]]
    [cut] = adjusted(logits, [LogitRule(logits={"top_k": 2})], [1.0]).tolist()
    assert [value > -1e9 for value in cut] == [True, True, False, False, False]
    # at temperature .5 the second has e^-2 = .135 of the likeliest's probability
    [by_share] = adjusted(logits, [LogitRule(logits={"min_p": 0.15})], [0.5]).tolist()
    assert [value > -1e9 for value in by_share] == [True, False, False, False, False]


def test_the_nucleus_is_that_of_the_tokens_that_top_k_left() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.0, 0.5]])  # probabilities .56, .21, .03, .08, .13
    [cut] = adjusted(logits, [LogitRule(logits={"top_p": 0.7})], [1.0]).tolist()
    assert [value > -1e9 for value in cut] == [True, True, False, False, False]
    # of two tokens the first has .73; a token that was sampled stays in, and counts
    rule = LogitRule(logits={"top_p": 0.7, "top_k": 2}, target=1)
    [cut] = adjusted(logits, [rule], [1.0]).tolist()
    assert ([value > -1e9 for value in cut], rule.cut) == ([True, True, False, False, False], True)


def test_each_token_is_cut_as_if_it_were_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 200)
    given = [{"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.6}, CUTS, {"top_k": 500}]
    kinds = [given[at % len(given)] for at in range(40)]
    temperatures = [0.5 + at / 40 for at in range(40)]
    together = adjusted(logits, [LogitRule(logits=one, target=7) for one in kinds], temperatures)
    for at, (kind, temperature) in enumerate(zip(kinds, temperatures, strict=True)):
        [alone] = adjusted(logits[at : at + 1], [LogitRule(logits=kind, target=7)], [temperature])
        assert torch.equal(together[at], alone)


def test_imitation_is_of_the_distribution_under_the_grammar(sampler: Sampler, folder: Path) -> None:
    ids, logprobs = sampled(sampler, 1, **GRAMMAR)
    metrics = Learner(folder, learner_setup()).forward_backward(
        [row([(PROMPT, ids, logprobs, decoding(GRAMMAR))])], Loss(name="sft")
    )
    assert metrics["loss"] == pytest.approx(-sum(logprobs), abs=1e-4)


def test_preferences_are_between_completions_under_their_grammars(sampler: Sampler, folder: Path) -> None:
    learner = Learner(folder, learner_setup(reference=True))
    rows = [row([(PROMPT, *sampled(sampler, seed, **GRAMMAR), decoding(GRAMMAR))]) for seed in (1, 2)]
    learner.forward_backward(rows[:1], Loss(name="sft"))
    learner.optim_step(1e-2, 1.0)
    before, now = learner.reference_logprobs(rows), learner.logprobs(rows)
    ratios = [sum(new[4:]) - sum(old[4:]) for new, old in zip(now, before, strict=True)]
    assert ratios[0] > 0.1
    chosen, rejected = (replace(one, ref_logprobs=values) for one, values in zip(rows, before, strict=True))
    examples = [Preference(chosen=[chosen], rejected=[rejected])]
    loss = learner.forward_backward_preferences(examples, PreferenceLoss(name="dpo", beta=0.1))["loss"]
    assert loss == pytest.approx(math.log(1 + math.exp(-0.1 * (ratios[0] - ratios[1]))), abs=1e-4)


def test_unmerged_rows_have_the_gradient_of_merged_ones(sampler: Sampler, folder: Path) -> None:
    first = sampled(sampler, 1, **GRAMMAR)
    second = sampled(sampler, 2, [*PROMPT, *first[0], 60], **GRAMMAR)
    applied = decoding(GRAMMAR)
    merged = row([(PROMPT, *first, applied), ([60], *second, applied)])
    apart = [row([(PROMPT, *first, applied)]), row([([*PROMPT, *first[0], 60], *second, applied)])]
    apart = [replace(one, advantages=[float(m) for m in one.mask]) for one in apart]
    gradients = []
    for rows in ([merged], apart):
        learner = Learner(folder, learner_setup())
        learner.forward_backward(rows, Loss())
        gradients.append(torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients, atol=1e-5)
