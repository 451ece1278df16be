"""Decoding: what a call's grammar, penalties and cuts do to logits, the same in the sampler and in the learner.

The sampler's scheduler drives it while it draws; the learner rebuilds the same masks from the recorded grammar and the
sampled ids. The order is vLLM's: grammar, logit_bias, penalties, then (over logits / temperature) min_p, top_k and top_p,
which the sampler cuts by as it draws (noise.py). Penalties count what the call itself sampled, repetition_penalty the prompt
as well. Refuses to know requests, rewards and losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentlightning.engines.local.noise import nucleus
from agentlightning.errors import EngineError, InputError
from agentlightning.rendering.grammar_masks import Grammars, Mask
from agentlightning.training_types import TrainingSequence
from agentlightning.types import JSON

CUTS = ("top_k", "min_p", "top_p")


@dataclass(slots=True, kw_only=True)
class LogitRule:
    """The constraints on the logits of one token."""

    allowed: Mask | None = None
    """The tokens that the grammar allows."""
    logits: Mapping[str, Any] = field(default_factory=dict)
    """Penalties, logit_bias and cuts, by vLLM's names."""
    prompt: Sequence[int] = ()
    sampled: Sequence[int] = ()
    """Tokens of the call before this one."""
    target: int | None = None
    """In a learner: the token that was sampled, which no cut takes out."""
    cut: bool = False
    """True where the learner's own cut would have taken the target out."""


def adjusted(logits_NV: Tensor, rules: Sequence[LogitRule | None], temperatures_N: Sequence[float]) -> Tensor:
    """The logits of the distribution that is drawn from, before the temperature; -inf for tokens that cannot be drawn."""
    masked = [(at, rule.allowed) for at, rule in enumerate(rules) if rule is not None and rule.allowed is not None]
    if masked:
        places = torch.tensor([at for at, _ in masked], device=logits_NV.device)
        words = torch.from_numpy(np.stack([np.frombuffer(allowed, np.int32) for _, allowed in masked])).to(
            logits_NV.device
        )
        keep_NV = torch.ones_like(logits_NV, dtype=torch.bool)
        keep_NV[places] = _bits(words, logits_NV.shape[-1])
        logits_NV = logits_NV.masked_fill(~keep_NV, float("-inf"))
    biased = [
        (at, int(token), value)
        for at, rule in enumerate(rules)
        if rule is not None
        for token, value in rule.logits.get("logit_bias", {}).items()
    ]
    if biased:
        at_N, tokens_N, values_N = (
            torch.tensor(column, device=logits_NV.device) for column in zip(*biased, strict=True)
        )
        logits_NV = logits_NV.index_put((at_N, tokens_N), values_N.to(logits_NV.dtype), accumulate=True)
    processed = [at for at, rule in enumerate(rules) if rule is not None and rule.logits.keys() - {"logit_bias"}]
    if processed:
        places = torch.tensor(processed, device=logits_NV.device)
        given = zip(logits_NV[places].unbind(), processed, strict=True)  # a gradient of the size of all, once
        rows = [_processed(row_V, rules[at], temperatures_N[at] or 1.0) for row_V, at in given]
        logits_NV = logits_NV.index_put((places,), torch.stack(rows))
    return logits_NV


def _bits(words_NW: Tensor, vocab: int) -> Tensor:
    shifts = torch.arange(32, device=words_NW.device, dtype=torch.int32)
    bits = ((words_NW[:, :, None] >> shifts) & 1).bool().flatten(1)
    missing = vocab - bits.shape[1]
    return torch.nn.functional.pad(bits, (0, missing)) if missing > 0 else bits[:, :vocab]


def _processed(row_V: Tensor, rule: LogitRule | None, temperature: float) -> Tensor:
    """The logits of a row under all of its rule but the grammar and the biases."""
    assert rule is not None
    given, device = rule.logits, row_V.device
    if allowed := given.get("allowed_token_ids"):
        forbidden_V = torch.ones_like(row_V, dtype=torch.bool).index_fill(
            0, torch.tensor(allowed, device=device), False
        )
        row_V = row_V.masked_fill(forbidden_V, float("-inf"))
    if len(rule.sampled) < given.get("min_tokens", 0):
        row_V = row_V.index_fill(0, torch.tensor(given["stop_token_ids"], device=device), float("-inf"))
    repetition = given.get("repetition_penalty", 1.0)
    if repetition != 1.0 and (rule.prompt or rule.sampled):
        seen = torch.tensor(sorted({*rule.prompt, *rule.sampled}), device=device)
        values = row_V[seen]
        row_V = row_V.index_put((seen,), torch.where(values > 0, values / repetition, values * repetition))
    frequency, presence = given.get("frequency_penalty", 0.0), given.get("presence_penalty", 0.0)
    if rule.sampled and (frequency or presence):
        ids_, counts = np.unique(np.asarray(rule.sampled, dtype=np.int64), return_counts=True)
        amounts = torch.from_numpy(frequency * counts + presence).to(device, row_V.dtype)
        row_V = row_V.index_add(0, torch.from_numpy(ids_).to(device), -amounts)
    if any(given.get(name) for name in CUTS):
        row_V = _cut(row_V, rule, temperature)
    return row_V


def _cut(row_V: Tensor, rule: LogitRule, temperature: float) -> Tensor:
    """Without the tokens that min_p, top_k and top_p take out, in this order; ties with the last of the top_k stay in."""
    scaled_V = row_V.detach() / temperature
    keep_V = torch.ones_like(scaled_V, dtype=torch.bool)
    if min_p := rule.logits.get("min_p"):
        keep_V &= scaled_V >= scaled_V.max() + float(np.log(min_p))
    top_k = rule.logits.get("top_k")
    if top_k and top_k < len(scaled_V):
        keep_V &= scaled_V >= scaled_V.topk(top_k).values[-1]
    if top_p := rule.logits.get("top_p"):
        left_V = scaled_V.masked_fill(~keep_V, float("-inf")).log_softmax(-1)
        keep_V &= nucleus(left_V[None], torch.tensor([top_p], device=left_V.device))[0] > float("-inf")
    if rule.target is not None and not bool(keep_V[rule.target]):
        rule.cut = True
        keep_V[rule.target] = True
    return row_V.masked_fill(~keep_V, float("-inf"))


class Constraint:
    """The constraints on one completion while it is sampled."""

    def __init__(self, grammars: Grammars, lark: str | None, logits: JSON, prompt: Sequence[int]) -> None:
        self._grammars = grammars
        self._matcher = None if lark is None else grammars.matcher(lark)
        self._logits = _bounded(logits, grammars)
        self._prompt = prompt

    def rule(self, sampled: Sequence[int]) -> LogitRule:
        """For the token after these. EngineError as `Grammars.allowed`."""
        allowed = None if self._matcher is None else self._grammars.allowed(self._matcher)
        return LogitRule(allowed=allowed, logits=self._logits, prompt=self._prompt, sampled=sampled)

    def take(self, token: int) -> None:
        """This token was drawn, and the completion goes on."""
        if self._matcher is not None:
            self._matcher.consume_token(token)


class BatchRules:
    """The rules of a micro-batch's tokens, each beside the state that predicts it."""

    def __init__(self, rules: list[LogitRule | None]) -> None:
        self._rules = rules

    def apply(self, logits_NV: Tensor, places_N: Tensor, temperatures_N: Tensor) -> Tensor:
        """The adjusted logits of a piece: those at these places of the micro-batch."""
        rules = [self._rules[place] for place in places_N.tolist()]
        return adjusted(logits_NV, rules, temperatures_N.tolist()) if any(rules) else logits_NV

    def cuts(self) -> tuple[int, int]:
        """(sampled tokens that the learner's own cut took out, tokens with a cut)."""
        cut = [rule for rule in self._rules if rule is not None and any(rule.logits.get(name) for name in CUTS)]
        return sum(rule.cut for rule in cut), len(cut)


def batch_rules(
    grammars: Grammars, sequences: Sequence[TrainingSequence], where: Sequence[tuple[int, int]]
) -> BatchRules | None:
    """For the states at these (sequence, position), each of which predicts the token after it; None where there are none."""
    if not any(sequence.decodings for sequence in sequences):
        return None
    of_row = [_sequence_rules(grammars, sequence) for sequence in sequences]
    return BatchRules([of_row[row].get(at + 1) for row, at in where])


def _bounded(logits: Mapping[str, Any], grammars: Grammars) -> Mapping[str, Any]:
    """The same with all the tokens that `min_tokens` forbids. InputError where no token may be drawn at all."""
    if "min_tokens" not in logits:
        return logits
    ends = sorted({*grammars.end_ids, *(one for one in logits.get("stop_token_ids", ()) if one < grammars.vocab)})
    if logits.get("allowed_token_ids") and not set(logits["allowed_token_ids"]) - set(ends):
        raise InputError("allowed_token_ids: all of them end a completion, which min_tokens forbids")
    return {**logits, "stop_token_ids": ends}


def _sequence_rules(grammars: Grammars, sequence: TrainingSequence) -> dict[int, LogitRule]:
    found: dict[int, LogitRule] = {}
    for (start, end), decoding in zip(sequence.segments, sequence.decodings, strict=False):
        sampled = sequence.tokens[start:end]
        spec, logits = decoding.get("grammar"), _bounded(decoding.get("logits", {}), grammars)
        if spec is None and not logits:
            continue
        try:
            masks: Sequence[Mask | None] = [None] * len(sampled) if spec is None else grammars.masks(spec, sampled)
        except (EngineError, InputError) as error:
            raise EngineError(f"rollout {sequence.rollout_id}: {error}") from error
        if set(sampled[: logits.get("min_tokens", 0)]) & set(logits.get("stop_token_ids", ())):
            raise EngineError(f"rollout {sequence.rollout_id}: a call ended before its min_tokens")
        prompt = sequence.tokens[:start] if "repetition_penalty" in logits else ()
        counted = "min_tokens" in logits or any(name.endswith("_penalty") for name in logits)
        for place, (token, mask) in enumerate(zip(sampled, masks, strict=True)):
            before = sampled[:place] if counted else ()
            found[start + place] = LogitRule(allowed=mask, logits=logits, prompt=prompt, sampled=before, target=token)
    return found
