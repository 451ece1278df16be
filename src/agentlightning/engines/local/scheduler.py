"""Continuous batching: requests join free rows between decode steps and leave when they end.

The sampler's event loop drives it, one `turn` at a time: admit and prefill what waits, then one decode step for every active
row. Active rows are dense (the last row moves into a hole), so that a batch is always a view of the cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentlightning.engines.local.decoder import Decoder
from agentlightning.engines.local.decoding import Constraint, LogitRule, adjusted, alternatives, draw, stream, uniforms
from agentlightning.errors import EngineError

ID_BYTES = 4


class PrefixCache:
    """Entries by the token ids they stand for (int32 bytes), least recently used first out, at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def put(self, ids: bytes, cached: Any, size: int) -> None:
        if size > self._limit or ids in self._entries:
            return
        self._entries[ids] = (cached, size)
        self._lengths[len(ids)] += 1
        self._used += size
        while self._used > self._limit:
            oldest, (_, freed) = self._entries.popitem(last=False)
            self._used -= freed
            self._lengths[len(oldest)] -= 1
            if not self._lengths[len(oldest)]:
                del self._lengths[len(oldest)]

    def longest(self, ids: bytes) -> tuple[int, Any]:
        """(tokens, what was kept) of the longest entry that `ids` goes on from, without the last id, whose logits are
        needed; (0, None) without one."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(ids) and ids[:length] in self._entries:
                self._entries.move_to_end(ids[:length])
                return length // ID_BYTES, self._entries[ids[:length]][0]
        return 0, None

    def clear(self) -> None:
        self._entries.clear()
        self._lengths.clear()
        self._used = 0


MAX_LOGITS = 1 << 23
"""Logits of one piece: 32 MB in float32."""

Score = tuple[int, float, int]
"""Token id, log-probability, rank; 1 is the likeliest."""


def score_prompt(
    decoder: Decoder, row: int, ids: list[int], alternatives: int, device: str, max_logits: int = MAX_LOGITS
) -> tuple[list[list[Score]], Tensor]:
    """Read a whole prompt into a row: for every token but the first its own score, then those of the likeliest, and the
    logits after the last token, as `Decoder.extend` gives them."""
    width = max(1, min(512, max_logits // decoder.vocab))
    found: list[list[Score]] = []
    logits_MV = torch.empty(0, decoder.vocab)
    for start in range(0, len(ids), width):
        part = ids[start : start + width]
        tokens_1M = torch.tensor([part], device=device)
        take_1M = torch.arange(len(part), device=device)[None]
        logits_MV = decoder.extend(row, tokens_1M, torch.tensor([start], device=device), take_1M)[0].cpu()
        following = ids[start + 1 : start + width + 1]
        found += _scores(logits_MV[: len(following)], following, alternatives)
    return found, logits_MV[-1:]


def _scores(logits_MV: Tensor, following: list[int], alternatives: int) -> list[list[Score]]:
    if not following:
        return []
    logprobs_MV = torch.log_softmax(logits_MV.float(), -1)
    own_M = logprobs_MV.gather(1, torch.tensor(following)[:, None])
    ranks = (logprobs_MV >= own_M).sum(-1).tolist()
    top = logprobs_MV.topk(min(alternatives, logprobs_MV.shape[-1]), dim=-1)
    rows = zip(following, own_M[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        [
            (token, own, rank),
            *((other, value, at) for at, (other, value) in enumerate(zip(ids, values, strict=True), 1)),
        ]
        for token, own, rank, ids, values in rows
    ]


TINY_PREFILL_TOKENS, PREFILL_TOKENS = 640, 1280
"""Padded tokens of one prefill on a CPU: activations of tiny models stay in a 2 MB cache; 135 million parameters read a
tenth more per second at 1,280 than at 640 or 5,120."""
CUDA_PREFILL_TOKENS = 16_384
CUDA_PREFILL_SCORES = 1 << 24
"""Of one prefill on CUDA: padded tokens, and tokens times those that they attend to (the scores of a head take 32 MB)."""
CHUNK = 512
"""New tokens of a row in one operation, at most; bounds the memory of attention scores."""
KEPT_PROMPT = 32
"""First prompts of at least this many tokens are kept for later rollouts of the same task."""
NOTHING_LEFT = (
    "logit_bias, allowed_token_ids, min_tokens and the grammar together leave no token that could be sampled next"
)
ROOM = 64
"""The cache grows in multiples of this many tokens."""


@dataclass(slots=True, eq=False)
class SamplingRequest:
    """One completion to sample, and what has been sampled of it."""

    prompt: list[int]
    max_tokens: int
    """At least 1; prompt and completion fit the context."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    streamed: bool = False
    """Report every token, not only the end."""
    alternatives: int = 0
    """Number of likeliest tokens to report with each one."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """Those, as (id, logprob)."""
    prompt_alternatives: int | None = None
    """Number of likeliest tokens to report with each one of the prompt; None: the prompt has no scores."""
    prompt_scores: list[list[Score]] | None = None
    """Those, for every token of the prompt but the first."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, index of its first token), oldest first."""
    constraint: Constraint | None = None
    """Its grammar, penalties and cuts."""
    finish: str | None = None
    """stop, length, or error: the logits were not finite, or `error` says what else was wrong."""
    error: str | None = None
    stop_reason: str | None = None
    cancelled: bool = False
    shown_prompt: list[int] | None = None
    """The prompt as the model's processor writes it, where `prompt` has ids of images."""
    images: Sequence[object] = ()
    """Kept as long as the prompt is used."""

    @property
    def unscored(self) -> bool:
        """True while its prompt is to be scored, for which it is read from the start."""
        return self.prompt_alternatives is not None and self.prompt_scores is None


@dataclass(frozen=True, slots=True)
class _Joining:
    """A request about to be prefilled."""

    ids: list[int]
    key: bytes
    """The ids as the prefix cache has them."""
    known: int
    cached: object
    """Keys and values of the first `known` ids."""
    request: SamplingRequest

    @property
    def new(self) -> int:
        return len(self.ids) - self.known


class Scheduler:
    """Rows of a decoder, shared out among requests.

    decode_text turns ids into text (only for stop strings). cache_bytes bounds keys and values: four fifths for active rows,
    the rest for prefixes. What does not fit waits; a row that outgrows it is continued later with the same noise.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_num_seqs: int,
        decode_text: Callable[[list[int]], str],
        cache_bytes: int = 4 * 10**9,
        version: str = "0",
        device: str = "cpu",
        prefill_tokens: int = TINY_PREFILL_TOKENS,
    ) -> None:
        self.version = version
        self._decoder = decoder
        self.max_num_seqs = max_num_seqs
        self._decode_text = decode_text
        self._cache_bytes = cache_bytes - cache_bytes // 5
        self.device = device
        self._draws_on = "cpu" if device.startswith("mps") else device  # which has no float64
        self._cuda = device.startswith("cuda")
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[SamplingRequest] = deque()
        self._active: list[SamplingRequest] = []
        self._prefixes = PrefixCache(cache_bytes // 5)
        self._rows = self._room = 0
        # One entry a row, kept dense with it: the last token, its position, and what to draw with.
        self._tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._lengths = np.zeros(max_num_seqs, dtype=np.int64)
        self._starts = np.zeros(max_num_seqs, dtype=np.int64)
        self._streams = np.zeros(max_num_seqs, dtype=np.uint64)
        self._temperatures = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_ps = np.zeros(max_num_seqs, dtype=np.float32)

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting)

    @property
    def counts(self) -> tuple[int, int]:
        """Active and waiting requests."""
        return len(self._active), len(self._waiting)

    def submit(self, request: SamplingRequest) -> None:
        self._waiting.append(request)

    def load(self, folder: Path, version: str) -> None:
        """Sample from these weights from the next token on; rows in flight keep the keys and values they have."""
        self._decoder.load(folder)
        self.version = version
        self._prefixes.clear()
        for request in self._active:
            request.versions.append((version, len(request.sampled)))

    def turn(self) -> list[SamplingRequest]:
        """Admit, prefill, decode once. Returns the requests with something new: an end, or a token of a streamed one."""
        updated: list[SamplingRequest] = []
        self._drop_cancelled()
        self._admit(updated)
        if self._active:
            self._make_room(int(self._lengths[: len(self._active)].max()) + 1)
            rows = len(self._active)
            tokens, lengths = torch.from_numpy(self._tokens[:rows]), torch.from_numpy(self._lengths[:rows])
            take = torch.zeros(rows, dtype=torch.long)
            logits = self._decoder.extend(0, tokens[:, None].to(self.device), lengths.to(self.device), take)
            self._lengths[:rows] += 1
            self._accept(0, logits, updated)
        return updated

    def _drop_cancelled(self) -> None:
        for row in range(len(self._active) - 1, -1, -1):
            if self._active[row].cancelled:
                self._leave(row)

    def _admit(self, updated: list[SamplingRequest]) -> None:
        if not self._active and self._bytes(self._rows, self._room) > self._cache_bytes // 2:
            self._rows = self._room = 0  # one very long row must not narrow the batch for ever
            self._decoder.reserve(0, 0)
        joining: list[_Joining] = []
        longest = max(self._room, ROOM)
        while self._waiting and len(self._active) + len(joining) < self.max_num_seqs:
            request = self._waiting[0]
            if not request.cancelled:
                ids = request.prompt + request.sampled
                longest = max(longest, _rounded(len(ids) + 1))
                count = len(self._active) + len(joining) + 1
                if count > 1 and self._bytes(count, longest) > self._cache_bytes:
                    break
                key = np.array(ids, dtype=np.int32).tobytes()
                known, cached = (0, None) if request.unscored else self._prefixes.longest(key)
                joining.append(_Joining(ids, key, known, cached, request))
            self._waiting.popleft()
        joining.sort(key=lambda each: (each.new, each.key))
        group: list[_Joining] = []
        for each in joining:
            # Padding must fit the context too: it is written behind the rows.
            reach = max([each.known, *(other.known for other in group)]) + each.new
            rows = len({other.key for other in group} | {each.key})  # equal prompts are computed once
            alone = each.request.unscored or any(other.request.unscored for other in group)
            if group and (alone or self._too_much(rows * each.new, reach) or reach > self._decoder.context):
                self._prefill(group, updated)
                group = []
            group.append(each)
        if group:
            self._prefill(group, updated)

    def _too_much(self, tokens: int, reach: int) -> bool:
        """True where one prefill should not have so many padded tokens, each of which attends to up to `reach`."""
        if not self._cuda:
            return tokens > self._prefill_tokens
        return tokens > CUDA_PREFILL_TOKENS or tokens * reach > CUDA_PREFILL_SCORES

    def _prefill(self, group: list[_Joining], updated: list[SamplingRequest]) -> None:
        """Rows for a group, longest last; equal prompts (the rollouts of one task) are computed once and copied."""
        leaders: dict[bytes, int] = {}
        order: list[_Joining] = []
        followers: list[_Joining] = []
        for each in group:
            (followers if each.key in leaders else order).append(each)
            leaders.setdefault(each.key, len(order) - 1)
        width = max(each.new for each in order)
        self._reserve(len(self._active) + len(group), max(each.known for each in order) + width)
        first = len(self._active)
        for row, each in enumerate(order, first):
            if each.cached is not None:
                self._decoder.write(row, each.cached)
        if (alone := order[0].request).unscored:
            wanted = alone.prompt_alternatives or 0
            alone.prompt_scores, logits = score_prompt(self._decoder, first, alone.prompt, wanted, self.device)
        else:
            logits = self._read_prompts(first, [(each.ids[each.known :], each.known) for each in order], width)
        self._keep_prompts(first, order)
        for row, each in enumerate(followers, first + len(order)):
            self._decoder.move(first + leaders[each.key], row, len(each.ids))
        if followers:
            source = [*range(len(order)), *(leaders[each.key] for each in followers)]
            logits = logits[torch.tensor(source, device=logits.device)]
        for each in (*order, *followers):
            self._join(each.request)
        self._accept(first, logits, updated)

    def _keep_prompts(self, first: int, order: list[_Joining]) -> None:
        """Keep prompts that go on from nothing, all but the last token, for the other rollouts of their task."""
        for row, each in enumerate(order, first):
            length = len(each.ids) - 1
            if not each.known and not each.request.sampled and length >= KEPT_PROMPT:
                kept = self._decoder.read(row, length)
                self._prefixes.put(each.key[:-ID_BYTES], kept, length * (self._decoder.row_bytes + ID_BYTES))

    def _read_prompts(self, first: int, rows: list[tuple[list[int], int]], width: int) -> torch.Tensor:
        """Logits after the last token of every row; long prompts are read in chunks."""
        last = torch.tensor([len(new) - 1 for new, _ in rows])
        offsets = torch.tensor([known for _, known in rows], device=self.device)
        tokens = torch.tensor([new + [0] * (width - len(new)) for new, _ in rows], device=self.device)
        if width <= CHUNK:
            return self._decoder.extend(first, tokens, offsets, last.to(self.device))
        found: torch.Tensor | None = None
        for start in range(0, width, CHUNK):
            part = tokens[:, start : start + CHUNK]
            inside = (last >= start) & (last < start + CHUNK)
            take = (last - start).clamp(0, part.shape[1] - 1)
            logits = self._decoder.extend(first, part, offsets + start, take.to(self.device))
            found = logits if found is None else torch.where(inside[:, None].to(logits.device), logits, found)
        assert found is not None
        return found

    def _join(self, request: SamplingRequest) -> None:
        row = len(self._active)
        self._active.append(request)
        if not request.versions or request.versions[-1][0] != self.version:
            request.versions.append((self.version, len(request.sampled)))
        self._lengths[row] = len(request.prompt) + len(request.sampled)
        self._starts[row] = len(request.prompt)
        self._streams[row] = stream(request.seed)
        self._temperatures[row] = request.temperature
        self._top_ps[row] = request.top_p

    def _accept(self, first: int, logits: torch.Tensor, updated: list[SamplingRequest]) -> None:
        """Draw a token for the rows from `first` on, and let go of those that end with it."""
        rows = slice(first, first + len(logits))
        logits = self._adjusted(first, logits.to(self._draws_on))
        noise = uniforms(self._streams[rows], self._lengths[rows] - self._starts[rows])
        columns = (noise, self._temperatures[rows], self._top_ps[rows])
        # On the logits' device: those of a large vocabulary take longer to another device than a model takes to make them.
        drawn = draw(logits, *(torch.from_numpy(column).to(logits.device) for column in columns))
        self._note_alternatives(first, logits)
        tokens, logprobs = drawn[0].tolist(), drawn[1].tolist()
        self._tokens[rows] = tokens
        ended: list[int] = []
        for row, (request, token, logprob) in enumerate(zip(self._active[rows], tokens, logprobs, strict=True), first):
            if logprob != logprob or request.error is not None:  # not a number
                request.finish = "error"
                if request.error is None and request.constraint is not None and logits[row - first].isneginf().all():
                    request.error = NOTHING_LEFT
            else:
                request.sampled.append(token)
                request.logprobs.append(logprob)
                self._check_end(request, token)
                if request.constraint is not None and not request.finish:
                    request.constraint.take(token)
            if request.finish:
                ended.append(row)
            if request.finish or request.streamed:
                updated.append(request)
        for row in reversed(ended):
            self._leave(row)

    def _adjusted(self, first: int, logits: torch.Tensor) -> torch.Tensor:
        """The logits under the rows' constraints; rows without one pay nothing."""
        rules: list[LogitRule | None] = []
        for request in self._active[first : first + len(logits)]:
            try:
                rules.append(None if request.constraint is None else request.constraint.rule(len(request.sampled)))
            except EngineError as error:
                request.error = str(error)
                rules.append(None)
        if not any(rules):
            return logits
        return adjusted(logits, rules, self._temperatures[first : first + len(logits)].tolist())

    def _note_alternatives(self, first: int, logits: torch.Tensor) -> None:
        """For the rows whose requests ask for them; the others pay nothing."""
        asking = [row for row in range(first, first + len(logits)) if self._active[row].alternatives]
        if not asking:
            return
        tokens, logprobs = alternatives(
            logits[[row - first for row in asking]],
            torch.from_numpy(self._temperatures[asking]).to(logits.device),
            torch.from_numpy(self._top_ps[asking]).to(logits.device),
            max(self._active[row].alternatives for row in asking),
        )
        for row, ids, values in zip(asking, tokens.tolist(), logprobs.tolist(), strict=True):
            request = self._active[row]
            pairs = list(zip(ids, values, strict=True))
            request.top.append([pair for pair in pairs[: request.alternatives] if pair[1] > float("-inf")])

    def _check_end(self, request: SamplingRequest, token: int) -> None:
        if token in request.stop_ids:
            request.finish = "stop"
            return
        if request.stops:
            # A character takes at most four tokens (bytes); what lies further back was checked before.
            tail = self._decode_text(request.sampled[-4 * max(map(len, request.stops)) - 4 :])
            stop = next((one for one in request.stops if one in tail), None)
            if stop is not None:
                request.stop_reason, request.finish = stop, "stop"
                return
        if len(request.sampled) >= request.max_tokens:
            request.finish = "length"

    def _leave(self, row: int) -> None:
        """Free a row: remember a finished completion's keys and values, move the last row into the hole."""
        request, length, last = self._active[row], int(self._lengths[row]), len(self._active) - 1
        if request.finish in ("stop", "length") and len(request.versions) == 1:
            ids = np.array((request.prompt + request.sampled)[:length], dtype=np.int32).tobytes()
            size = length * (self._decoder.row_bytes + ID_BYTES)
            self._prefixes.put(ids, self._decoder.read(row, length), size)
        if row != last:
            self._decoder.move(last, row, int(self._lengths[last]))
            self._active[row] = self._active[last]
            for column in (
                self._tokens, self._lengths, self._starts, self._streams, self._temperatures, self._top_ps,
            ):  # fmt: skip
                column[row] = column[last]
        self._active.pop()

    def _make_room(self, length: int) -> None:
        """Grow the cache for the next token; where that breaks the bound, the youngest rows wait for their turn."""
        while len(self._active) > 1 and self._bytes(len(self._active), _rounded(length)) > self._cache_bytes:
            self._waiting.appendleft(self._active[-1])
            self._leave(len(self._active) - 1)
            length = int(self._lengths[: len(self._active)].max()) + 1
        self._reserve(len(self._active), length)

    def _reserve(self, rows: int, length: int) -> None:
        if rows <= self._rows and length <= self._room:
            return
        self._room = max(self._room, min(_rounded(length), self._decoder.context))
        # Rows double, so that a burst of arrivals copies the cache a few times only; not where memory is what is short.
        ample = min(self.max_num_seqs, max(8, self._rows, 1 << (rows - 1).bit_length()))
        self._rows = ample if self._bytes(ample, self._room) <= self._cache_bytes else rows
        self._decoder.reserve(self._rows, self._room)

    def _bytes(self, rows: int, length: int) -> int:
        return rows * length * self._decoder.row_bytes


def _rounded(length: int) -> int:
    return -(-length // ROOM) * ROOM
