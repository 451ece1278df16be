"""Decoding: what a call's grammar, penalties and cuts do to logits, the same in the sampler and in the learner; and drawing.

The sampler's scheduler drives it while it draws; the learner rebuilds the same masks from the recorded grammar and the
sampled ids. The order is vLLM's: grammar, logit_bias, penalties, then (over logits / temperature) min_p, top_k and top_p.
The token at position p of a completion depends on the request's seed, p and the logits alone, never on what else is in the
batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentlightning.errors import EngineError, InputError
from agentlightning.records import JSON
from agentlightning.rendering.grammar import Grammars, Mask
from agentlightning.training_types import TrainingSequence

MASK_64 = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# 53 random bits as a fraction, a hair below 1, so that u * total < total for every float64 total.
FRACTION = 2.0**-53 * (1.0 - 2.0**-52)
ROUNDING = 1e-5
"""By how much the mass of a whole vocabulary may differ from 1."""


def stream(seed: int) -> int:
    """First counter of a seed's noise: mixed once, so that the seeds 0, 1, 2, … have unrelated streams."""
    return int(_mix(np.array([seed & MASK_64], dtype=np.uint64))[0])


def uniforms(streams_B: NDArray[np.uint64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (stream, position): SplitMix64 (Steele, Lea and Flood, 2014), read at a counter."""
    bits = _mix(streams_B + (positions_B.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * FRACTION


def draw(logits_BV: Tensor, uniforms_B: Tensor, temperatures_B: Tensor, top_ps_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF, and its log-probability under softmax(logits / temperature), cut to the nucleus and
    renormalised if top_p < 1. Temperature 0 takes the largest logit and reports its plain log_softmax."""
    logprobs_BV, greedy_B = _distribution(logits_BV, temperatures_B, top_ps_B)
    # float64, so that the sum over a large vocabulary loses no tail.
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    targets_B = uniforms_B[:, None] * cumulative_BV[:, -1:]
    tokens_B = torch.searchsorted(cumulative_BV, targets_B, right=True)[:, 0]
    tokens_B = tokens_B.clamp_(max=logits_BV.shape[-1] - 1)  # reached only where the logits are not finite
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def alternatives(logits_BV: Tensor, temperatures_B: Tensor, top_ps_B: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` likeliest tokens of each row, and their log-probabilities under the distribution of `draw`."""
    logprobs_BV, _ = _distribution(logits_BV, temperatures_B, top_ps_B)
    logprobs_BK, tokens_BK = logprobs_BV.topk(min(most, logits_BV.shape[-1]), dim=-1)
    return tokens_BK, logprobs_BK


def _distribution(logits_BV: Tensor, temperatures_B: Tensor, top_ps_B: Tensor) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and which rows are greedy (None where none is)."""
    zero_B = temperatures_B == 0
    greedy_B = zero_B if bool(zero_B.any()) else None
    if greedy_B is not None:
        temperatures_B = torch.where(greedy_B, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / temperatures_B[:, None], -1)
    nucleus_B = top_ps_B < 1 if greedy_B is None else (top_ps_B < 1) & ~greedy_B
    if bool(nucleus_B.any()):
        logprobs_BV = torch.where(nucleus_B[:, None], nucleus(logprobs_BV, top_ps_B), logprobs_BV)
    return logprobs_BV, greedy_B


def nucleus(logprobs_BV: Tensor, top_ps_B: Tensor) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches top_p (Holtzman et al., 2020, section 3.1); of equally
    likely ones the first. Tokens so unlikely that all of them have less than 1 - top_p are in no such set, and are not
    sorted."""
    least_B = ((1 - top_ps_B - ROUNDING).clamp(min=0) / logprobs_BV.shape[-1]).log()
    likely = int((logprobs_BV >= least_B[:, None]).sum(-1).max())
    sorted_BK = logprobs_BV.topk(max(likely, 1), dim=-1).values
    mass_BK = sorted_BK.exp().cumsum(-1, dtype=torch.float64)
    inside_BK = mass_BK - sorted_BK.exp() < top_ps_B[:, None]
    sizes_B = inside_BK.sum(-1).clamp(min=1)  # whatever rounding says, the most likely token is in
    last_B1 = sorted_BK.gather(1, sizes_B[:, None] - 1)
    above_BV, equal_BV = logprobs_BV > last_B1, logprobs_BV == last_B1
    left_B = sizes_B - above_BV.sum(-1)
    inside_BV = above_BV | (equal_BV & (equal_BV.cumsum(-1, dtype=torch.int32) <= left_B[:, None]))
    cut_BV = logprobs_BV.masked_fill(~inside_BV, float("-inf"))
    return cut_BV - cut_BV.logsumexp(-1, keepdim=True)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


CUTS = ("top_k", "min_p", "top_p")
ROWS_AT_ONCE = 16
"""Rows that are cut at a time: what that takes is some ten times their size."""


class TokenHistory:
    """The tokens that a call's penalties count: those of `prompt`, and its own as far as they have come. Every place of the
    call reads its own from the same arrays, so that a long call takes no more memory than its tokens."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._ids = array("q", dict.fromkeys(prompt))
        self._prompt = len(self._ids)
        self._slots = {token: slot for slot, token in enumerate(self._ids)}
        self._order = array("q")

    def add(self, token: int) -> None:
        """This token was sampled."""
        slot = self._slots.setdefault(token, len(self._ids))
        if slot == len(self._ids):
            self._ids.append(token)
        self._order.append(slot)

    def before(self, place: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(ids of the prompt and of the first `place` sampled tokens, how often each of them was sampled there)."""
        counts = np.bincount(np.array(self._order[:place], dtype=np.int64), minlength=self._prompt)
        return np.array(self._ids[: len(counts)], dtype=np.int64), counts


@dataclass(slots=True, kw_only=True)
class LogitRule:
    """The constraints on the logits of one token."""

    allowed: Mask | None = None
    """The tokens that the grammar allows."""
    logits: Mapping[str, Any] = field(default_factory=dict)
    """Penalties, logit_bias and cuts, by vLLM's names."""
    place: int = 0
    """Tokens of the call before this one."""
    history: TokenHistory | None = None
    """Those tokens and the prompt's, where a penalty counts them."""
    target: int | None = None
    """In a learner: the token that was sampled, which no cut takes out."""
    cut: bool = False
    """True where the learner's own cut would have taken the target out."""

    @property
    def cuts(self) -> bool:
        """True where there is a cut."""
        return any(self.logits.get(name) for name in CUTS)


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
    processed = [at for at, rule in enumerate(rules) if rule is not None and rule.logits.keys() - {"logit_bias", *CUTS}]
    if processed:
        places = torch.tensor(processed, device=logits_NV.device)
        given = zip(logits_NV[places].unbind(), processed, strict=True)  # a gradient of the size of all, once
        rows = [_processed(row_V, rules[at]) for row_V, at in given]
        logits_NV = logits_NV.index_put((places,), torch.stack(rows))
    cut = [(at, rule) for at, rule in enumerate(rules) if rule is not None and rule.cuts]
    return _cut(logits_NV, cut, temperatures_N) if cut else logits_NV


def _bits(words_NW: Tensor, vocab: int) -> Tensor:
    shifts = torch.arange(32, device=words_NW.device, dtype=torch.int32)
    bits = ((words_NW[:, :, None] >> shifts) & 1).bool().flatten(1)
    missing = vocab - bits.shape[1]
    return torch.nn.functional.pad(bits, (0, missing)) if missing > 0 else bits[:, :vocab]


def _processed(row_V: Tensor, rule: LogitRule | None) -> Tensor:
    """The logits of a row under all of its rule but the grammar, the biases and the cuts."""
    assert rule is not None
    given, device = rule.logits, row_V.device
    if allowed := given.get("allowed_token_ids"):
        forbidden_V = torch.ones_like(row_V, dtype=torch.bool).index_fill(
            0, torch.tensor(allowed, device=device), False
        )
        row_V = row_V.masked_fill(forbidden_V, float("-inf"))
    if rule.place < given.get("min_tokens", 0):
        row_V = row_V.index_fill(0, torch.tensor(given["stop_token_ids"], device=device), float("-inf"))
    if rule.history is not None:
        row_V = _penalised(row_V, given, *rule.history.before(rule.place))
    return row_V


def _penalised(
    row_V: Tensor, given: Mapping[str, Any], ids_U: NDArray[np.int64], counts_U: NDArray[np.int64]
) -> Tensor:
    """The logits less their penalties, of U distinct tokens and how often each was sampled (0: the prompt alone has it)."""
    if not len(ids_U):
        return row_V
    seen_U = torch.from_numpy(ids_U).to(row_V.device)
    repetition = given.get("repetition_penalty", 1.0)
    if repetition != 1.0:
        values_U = row_V[seen_U]
        row_V = row_V.index_put((seen_U,), torch.where(values_U > 0, values_U / repetition, values_U * repetition))
    frequency, presence = given.get("frequency_penalty", 0.0), given.get("presence_penalty", 0.0)
    if frequency or presence:
        amounts_U = torch.from_numpy(frequency * counts_U + presence * (counts_U > 0)).to(row_V.device, row_V.dtype)
        row_V = row_V.index_add(0, seen_U, -amounts_U)
    return row_V


def _cut(logits_NV: Tensor, rules: Sequence[tuple[int, LogitRule]], temperatures_N: Sequence[float]) -> Tensor:
    """Without the tokens that the cuts of these rules, each with its row, take out."""
    device = logits_NV.device
    outside_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    for start in range(0, len(rules), ROWS_AT_ONCE):
        rows, some = zip(*rules[start : start + ROWS_AT_ONCE], strict=True)
        places_C = torch.tensor(rows, device=device)
        temperatures_C = torch.tensor([temperatures_N[at] or 1.0 for at in rows], device=device)
        outside_NV[places_C] = _outside(logits_NV.detach()[places_C] / temperatures_C[:, None], some)
    return logits_NV.masked_fill(outside_NV, float("-inf"))


def _outside(scaled_CV: Tensor, rules: Sequence[LogitRule]) -> Tensor:
    """The tokens that min_p, top_k and top_p take out, in this order; ties with the last of the top_k stay in, and so does
    what was sampled."""
    outside_CV = torch.zeros_like(scaled_CV, dtype=torch.bool)
    for name, cut in (("min_p", _below_share), ("top_k", _below_rank), ("top_p", _outside_nucleus)):
        given = [(at, rule.logits[name]) for at, rule in enumerate(rules) if rule.logits.get(name)]
        if given:
            rows, values_R = (torch.tensor(column, device=scaled_CV.device) for column in zip(*given, strict=True))
            left_RV = scaled_CV[rows].masked_fill(outside_CV[rows], float("-inf"))
            outside_CV[rows] |= cut(left_RV, values_R)
    targets_C = torch.tensor([rule.target or 0 for rule in rules], device=scaled_CV.device)
    lost_C = outside_CV.gather(1, targets_C[:, None])[:, 0].tolist()
    for at, (rule, lost) in enumerate(zip(rules, lost_C, strict=True)):
        if rule.target is not None and lost:
            rule.cut = True
            outside_CV[at, rule.target] = False
    return outside_CV


def _below_share(scaled_RV: Tensor, min_ps_R: Tensor) -> Tensor:
    return scaled_RV < scaled_RV.amax(-1, keepdim=True) + min_ps_R.log()[:, None]


def _below_rank(scaled_RV: Tensor, top_ks_R: Tensor) -> Tensor:
    ranks_R = top_ks_R.clamp(max=scaled_RV.shape[-1])
    sorted_RK = scaled_RV.topk(int(ranks_R.max())).values
    return scaled_RV < sorted_RK.gather(1, ranks_R[:, None] - 1)


def _outside_nucleus(scaled_RV: Tensor, top_ps_R: Tensor) -> Tensor:
    return nucleus(scaled_RV.log_softmax(-1), top_ps_R) == float("-inf")


class Constraint:
    """The constraints on one completion while it is sampled."""

    def __init__(self, grammars: Grammars, lark: str | None, logits: JSON, prompt: Sequence[int]) -> None:
        self._grammars = grammars
        self._matcher = None if lark is None else grammars.matcher(lark)
        self._logits = _bounded(logits, grammars)
        self._history = _history(logits, prompt)

    def rule(self, place: int) -> LogitRule:
        """For the token after the first `place` ones. EngineError as `Grammars.allowed`."""
        allowed = None if self._matcher is None else self._grammars.allowed(self._matcher)
        return LogitRule(allowed=allowed, logits=self._logits, place=place, history=self._history)

    def take(self, token: int) -> None:
        """This token was drawn, and the completion goes on."""
        if self._matcher is not None:
            self._matcher.consume_token(token)
        if self._history is not None:
            self._history.add(token)


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
        cut = [rule for rule in self._rules if rule is not None and rule.cuts]
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
    """The same with all the tokens that `min_tokens` forbids. InputError if no token may be drawn at all."""
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
        history = _history(logits, sequence.tokens[:start])
        for place, (token, mask) in enumerate(zip(sampled, masks, strict=True)):
            found[start + place] = LogitRule(allowed=mask, logits=logits, place=place, history=history, target=token)
            if history is not None:
                history.add(token)
    return found


def _history(logits: Mapping[str, Any], prompt: Iterable[int]) -> TokenHistory | None:
    """Counts nothing yet; None if no penalty counts tokens."""
    if not any(name.endswith("_penalty") for name in logits):
        return None
    return TokenHistory(prompt if "repetition_penalty" in logits else ())
