"""Micro-batches: which sequences are computed together, and where in the model's output each token's state is.

The learner drives it. Two ways give the same numbers: rows padded to equal length, and prefix trees, in which sequences that
begin alike share every common token. A tree is flattened depth first, so that the tokens that follow token j, on whatever
branch, are the ones from j to end[j]: token i sees token j exactly if j <= i < end[j]. Positions count from the root. A
token's state depends on its ancestors alone, so states and gradients are those of separate rows, up to rounding.

    [1 2 3 4], [1 2 3 5 6], [1 2 7]   ->   tokens    1 2 3 4 5 6 7
                                           positions 0 1 2 3 3 4 2
                                           runs      [1 2] -> [3] -> [4], [5 6]; [1 2] -> [7]

A *run* is a stretch without a branch inside. On a CPU each run attends to its ancestors' runs and to itself; on a GPU
FlexAttention skips the blocks in which no token sees another; elsewhere one masked call does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from agentlightning.config.engine import EngineConfig
from agentlightning.errors import EngineError
from agentlightning.training_types import TrainingSequence

ATTENTION = "agentlightning_tree"
"""Name under which transformers knows `tree_attention`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a tree without a branch inside."""

    start: int
    end: int
    ancestors: tuple[int, ...]
    """Numbers of the runs before it, from the root."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A flattened tree of N tokens and how to attend in it."""

    tokens: list[int]
    positions: list[int]
    ends: list[int]
    """End of the tokens that follow each token."""
    runs: list[Segment]
    paths: list[list[int]]
    """Places of the tokens of each sequence, as given."""


def build_tree(sequences: Sequence[Sequence[int]]) -> Tree:
    """The tree of the sequences; equal beginnings are one branch. Costs a sort and one look at every token."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: dict[int, list[int]] = {}
    before: Sequence[int] = []
    path: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda i: list(sequences[i])):
        sequence = sequences[index]
        shared = common(before, sequence)
        first = len(tokens)
        path = path[:shared] + list(range(first, first + len(sequence) - shared))
        tokens += sequence[shared:]
        parents += path[shared - 1 : -1] if shared else [-1, *path[:-1]]
        paths[index] = path
        before = sequence
    positions: list[int] = []
    for parent in parents:
        positions.append(0 if parent < 0 else positions[parent] + 1)
    ends = list(range(1, len(tokens) + 1))
    for i in range(len(tokens) - 1, -1, -1):
        if parents[i] >= 0:
            ends[parents[i]] = max(ends[parents[i]], ends[i])
    return Tree(tokens, positions, ends, _runs(parents), [paths[i] for i in range(len(sequences))])


def packs(sequences: Sequence[Sequence[int]], budget: int) -> Iterator[list[int]]:
    """Indices of sequences, so that each part's tree has at most `budget` tokens; a longer sequence is a part of its own.
    Neighbours in lexicographic order share the most, so they stay together."""
    part: list[int] = []
    used = 0
    for index in sorted(range(len(sequences)), key=lambda i: list(sequences[i])):
        new = len(sequences[index]) - (common(sequences[part[-1]], sequences[index]) if part else 0)
        if part and used + new > budget:
            yield part
            part, used, new = [], 0, len(sequences[index])
        part.append(index)
        used += new
    if part:
        yield part


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning, by bisection: comparing slices is quick.

    >>> common([1, 2, 3], [1, 2, 4, 5]), common([], [1]), common([7], [7])
    (2, 0, 1)
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _runs(parents: list[int]) -> list[Segment]:
    """A run ends where a branch leaves it; in depth-first order one begins where the parent is not the token before."""
    branched = {parent for i, parent in enumerate(parents) if parent != i - 1}
    starts = [i for i, parent in enumerate(parents) if parent != i - 1 or i - 1 in branched or i == 0]
    number = [0] * len(parents)
    runs: list[Segment] = []
    for start, end in zip(starts, [*starts[1:], len(parents)], strict=True):
        parent = parents[start]
        above = () if parent < 0 else (*runs[number[parent]].ancestors, number[parent])
        number[start:end] = [len(runs)] * (end - start)
        runs.append(Segment(start, end, above))
    return runs


How = Literal["runs", "flex", "mask"]
NARROWEST_FLEX = 16
"""Numbers of a head below which FlexAttention has no kernel."""


def how_on(device: str) -> How:
    """The quickest way to attend on a device."""
    kinds: dict[str, How] = {"cpu": "runs", "cuda": "flex"}
    return kinds.get(torch.device(device).type, "mask")


class TreeMask:
    """Inputs of `tree_attention`, on its device, made once for all layers."""

    def __init__(self, tree: Tree, device: str, how: How | None = None) -> None:
        self.how = how or how_on(device)
        self.lengths = [run.end - run.start for run in tree.runs]
        self.ancestors = [run.ancestors for run in tree.runs]
        self.inner: list[Tensor | None] = []
        self._ends = torch.tensor(tree.ends, device=device)
        self._compiled = torch.device(device).type != "cpu"
        if self.how == "runs":
            for run, length in zip(tree.runs, self.lengths, strict=True):
                above = sum(self.lengths[a] for a in run.ancestors)
                needed = above and length > 1  # a lone token sees all, a root is plainly causal
                # Made only where it is needed: a root of 64K tokens would take 4 GB.
                ones = torch.ones(length, above + length, dtype=torch.bool) if needed else None
                self.inner.append(None if ones is None else ones.tril_(above))

    @cached_property
    def whole(self) -> Tensor:
        """[N, N], whether token i sees token j."""
        at = torch.arange(len(self._ends), device=self._ends.device)
        return (at[None, :] <= at[:, None]) & (at[:, None] < self._ends[None, :])

    @cached_property
    def blocks(self) -> Any:
        """The same as FlexAttention takes it: which blocks of tokens see which, and the rule within a block."""
        from torch.nn.attention.flex_attention import create_block_mask

        ends, count = self._ends, len(self._ends)

        def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j])

        return create_block_mask(sees, None, None, count, count, device=str(ends.device))

    @property
    def flex_attention(self) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return _compiled_flex() if self._compiled else flex_attention


@cache
def _compiled_flex() -> Any:
    """Only compiled does it skip anything. Once a process: all trees share the kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree: TreeMask | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [1, heads, N, width] in, [1, N, heads, width] out. Without a tree, plain."""
    if tree is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return plain
    grouped = query.shape[1] != key.shape[1]
    if tree.how == "flex" and query.shape[-1] >= NARROWEST_FLEX:
        # Autocast, which turns what scaled_dot_product_attention gets into one type, does not know FlexAttention.
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = tree.flex_attention(query, key, value, block_mask=tree.blocks, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2), None
    if tree.how != "runs":
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=tree.whole, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2), None
    with torch.autocast("cpu", enabled=False):  # on a CPU the backward pass of short runs is thrice as quick in float32
        out = _attend_by_runs(tree, query.float(), key.float(), value.float(), scaling)
    return out.to(value.dtype), None


def _attend_by_runs(tree: TreeMask, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    # Split once and joined once: a slice's backward would write zeros for the whole tree.
    queries, keys, values = (torch.split(part, tree.lengths, 2) for part in (query, key, value))
    outs = []
    for run, above in enumerate(tree.ancestors):
        seen = (*above, run)
        mask = tree.inner[run]
        outs.append(
            F.scaled_dot_product_attention(
                queries[run],
                torch.cat([keys[a] for a in seen], 2) if above else keys[run],
                torch.cat([values[a] for a in seen], 2) if above else values[run],
                attn_mask=mask,
                is_causal=not above and tree.lengths[run] > 1,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outs, 2).transpose(1, 2)


def attend_in_trees(model: Any) -> None:
    """Let the model's layers attend by `tree_attention`; without the keyword `tree` they compute what they did."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, tree_attention)
    model.config._attn_implementation = ATTENTION


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that are computed together."""

    sequences: list[TrainingSequence]
    tokens_BT: Tensor
    places: list[Sequence[int]]
    """Flat index in [B, T] of each token of each sequence."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's forward."""

    def pick(self, where: Sequence[tuple[int, int]]) -> Tensor:
        """Flat indices in [B, T] of (sequence, position)."""
        found = [self.places[row][at] for row, at in where]
        return torch.tensor(found, dtype=torch.int64, device=self.tokens_BT.device)


def batches(
    sequences: Sequence[TrainingSequence], config: EngineConfig, device: str, *, rank: int = 0, ranks: int = 1
) -> Iterator[Batch]:
    """Sequences of at most max_tokens_per_microbatch at a time, of one rank's share: padded ones, sorted by length, or the
    tokens of a tree. Every rank gets as many; if its own are fewer, the last are without sequences."""
    shares = [list(_groups(share, config)) for share in _shares(sequences, config.packing, ranks)]
    for turn in range(max(len(groups) for groups in shares)):
        group = shares[rank][turn] if turn < len(shares[rank]) else []
        yield _shared(group, device) if group and config.packing == "prefix_tree" else _padded(group, device)


def _shares(sequences: Sequence[TrainingSequence], packing: str, ranks: int) -> list[list[TrainingSequence]]:
    """Every rank's share, of about as much work: dealt by length, or cut so that what begins alike stays together."""
    if packing != "prefix_tree":
        dealt = sorted(sequences, key=lambda s: len(s.tokens))
        return [dealt[rank::ranks] for rank in range(ranks)]
    shares: list[list[TrainingSequence]] = [[] for _ in range(ranks)]
    before, total = 0, sum(len(s.tokens) for s in sequences)
    for sequence in sorted(sequences, key=lambda s: s.tokens):
        shares[before * ranks // total].append(sequence)
        before += len(sequence.tokens)
    return shares


def _groups(sequences: Sequence[TrainingSequence], config: EngineConfig) -> Iterator[list[TrainingSequence]]:
    budget = config.max_tokens_per_microbatch
    if config.packing == "prefix_tree":
        for part in packs([sequence.tokens for sequence in sequences], budget):
            yield [sequences[i] for i in part]
        return
    group: list[TrainingSequence] = []
    for sequence in sorted(sequences, key=lambda s: len(s.tokens)):
        if group and (len(group) + 1) * len(sequence.tokens) > budget:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


def _padded(group: list[TrainingSequence], device: str) -> Batch:
    """Padded on the right: with causal attention no mask is needed. Without sequences one token, which nobody reads."""
    width = max((len(s.tokens) for s in group), default=1)
    rows = [s.tokens + [0] * (width - len(s.tokens)) for s in group] or [[0]]
    tokens_BT = torch.tensor(rows, device=device)
    return Batch(group, tokens_BT, [range(row * width, row * width + width) for row in range(len(group))])


def _shared(group: list[TrainingSequence], device: str) -> Batch:
    built = build_tree([s.tokens for s in group])
    inputs = {
        "position_ids": torch.tensor([built.positions], device=device),
        "tree": TreeMask(built, device),
    }
    return Batch(group, torch.tensor([built.tokens], device=device), list(built.paths), inputs)


def check_sequences(sequences: Sequence[TrainingSequence], config: Any) -> None:
    """EngineError, naming the rollout, where a model of this text configuration cannot compute a sequence."""
    longest = getattr(config, "max_position_embeddings", None)
    for sequence in sequences:
        if not sequence.tokens or (longest and len(sequence.tokens) > longest):
            raise EngineError(
                f"a sequence of rollout {sequence.rollout_id} has {len(sequence.tokens)} tokens; expected 1 to {longest}"
            )
        if sequence.mask[0]:
            raise EngineError(
                f"the first token of rollout {sequence.rollout_id} is masked as sampled; nothing precedes it"
            )
        if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < config.vocab_size:
            raise EngineError(
                f"a sequence of rollout {sequence.rollout_id} holds ids from {min(sequence.tokens)} to "
                f"{max(sequence.tokens)}; the model's vocabulary has ids 0 to {config.vocab_size - 1}"
            )
