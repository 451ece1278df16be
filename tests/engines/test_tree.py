"""Prefix trees: their shape, and that what is computed in one is what separate rows compute."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from learner_gradients import gradients

from agentlightning.engines.local.batches import How, TreeMask, build_tree, packs, tree_attention
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.model import Hardware
from agentlightning.errors import ModelError
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import Loss, TrainingSequence
from build import learner_setup

Rows = list[list[int]]
rows_of_tokens = st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=9), min_size=1, max_size=7)


def test_three_sequences_become_the_tree_of_the_module_s_example() -> None:
    built = build_tree([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7]])
    assert built.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert built.positions == [0, 1, 2, 3, 3, 4, 2]
    assert built.ends == [7, 7, 6, 4, 6, 6, 7]
    assert [(run.start, run.end, run.ancestors) for run in built.runs] == [
        (0, 2, ()),
        (2, 3, (0,)),
        (3, 4, (0, 1)),
        (4, 6, (0, 1)),
        (6, 7, (0,)),
    ]
    assert built.paths == [[0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 1, 6]]


@given(rows_of_tokens)
def test_every_sequence_reads_along_its_path_and_every_beginning_stands_once(rows: Rows) -> None:
    built = build_tree(rows)
    for row, path in zip(rows, built.paths, strict=True):
        assert [built.tokens[at] for at in path] == row
        assert [built.positions[at] for at in path] == list(range(len(row)))
    assert len(built.tokens) == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@given(rows_of_tokens)
def test_a_token_sees_itself_and_what_stands_before_it_on_its_path(rows: Rows) -> None:
    built = build_tree(rows)
    seen = {(i, j) for i in range(len(built.tokens)) for j in range(i + 1) if i < built.ends[j]}
    assert seen == {(i, j) for path in built.paths for at, i in enumerate(path) for j in path[: at + 1]}
    by_runs = {
        (i, j)
        for number, run in enumerate(built.runs)
        for i in range(run.start, run.end)
        for above in (*run.ancestors, number)
        for j in range(built.runs[above].start, min(i + 1, built.runs[above].end))
    }
    assert by_runs == seen


@given(rows_of_tokens, st.integers(1, 30))
def test_parts_hold_every_sequence_once_within_the_budget_of_unique_tokens(rows: Rows, budget: int) -> None:
    parts = list(packs(rows, budget))
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    for part in parts:
        unique = {tuple(rows[i][:end]) for i in part for end in range(1, len(rows[i]) + 1)}
        assert len(unique) <= budget or len({tuple(rows[i]) for i in part}) == 1


def learners(folder: Path, max_tokens_per_microbatch: int = 4096, **options: Any) -> tuple[Learner, Learner]:
    small = learner_setup(packing="prefix_tree", max_tokens_per_microbatch=max_tokens_per_microbatch)
    return Learner(folder), Learner(folder, small, **options)


@pytest.fixture(scope="module")
def pair(llama: Path) -> tuple[Learner, Learner]:
    return learners(llama)


def assert_same(padded: Learner, shared: Learner, sequences: list[TrainingSequence], loss: Loss) -> None:
    expected = padded.forward_backward(sequences, loss)
    assert shared.forward_backward(sequences, loss) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    wanted, found = gradients(padded), gradients(shared)
    assert wanted.keys() == found.keys()
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], rtol=1e-3, atol=2e-5 * float(wanted[name].abs().max() + 1)
        )


def branching(chance: random.Random) -> list[TrainingSequence]:
    """A random tree of calls: every row continues an earlier one from some point, with sampled tokens of its own."""
    rows: list[list[int]] = [[chance.randrange(2, 64) for _ in range(chance.randrange(1, 12))]]
    found = []
    for _ in range(chance.randrange(1, 8)):
        beginning = chance.choice(rows)
        beginning = beginning[: chance.randrange(1, len(beginning) + 1)]
        new = [chance.randrange(2, 64) for _ in range(chance.randrange(1, 10))]
        row = beginning + new
        rows.append(row)
        changes: dict[str, Any] = {"temperature": chance.choice([1.0, 0.7])}
        for name in ("logprobs", "advantages", "weights"):
            low = 0.1 if name == "weights" else -3.0
            high = {"logprobs": -0.5, "advantages": 2.0, "weights": 1.0}[name]
            changes[name] = [chance.uniform(low, high) for _ in row]
        found.append(sequence(row, [(len(beginning), len(row))], **changes))
    return found


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.sampled_from(["ppo_clip", "gspo", "cispo", "sft"]))
def test_losses_and_gradients_of_random_trees_are_those_of_separate_rows(
    pair: tuple[Learner, Learner], seed: int, name: Any
) -> None:
    sequences, loss = branching(random.Random(seed)), Loss(name=name, entropy=0.0 if name == "sft" else 0.02)
    assume(not on_a_bound(pair[0], sequences, loss))
    assert_same(*pair, sequences, loss)


def on_a_bound(learner: Learner, sequences: list[TrainingSequence], loss: Loss) -> bool:
    """Whether the ratio of a token or of a row is so near to where it is clipped that rounding decides on its side."""
    for row, now in zip(sequences, learner.logprobs(sequences), strict=True):
        own = [new - old for new, old, mine in zip(now, row.logprobs, row.mask, strict=True) if mine]
        for ratio in map(math.exp, [*own, statistics.fmean(own)]):
            if min(abs(ratio - 1 + loss.clip_low), abs(ratio - 1 - loss.clip_high)) < 1e-4:
                return True
    return False


def test_small_parts_and_small_pieces_of_logits_agree(llama: Path) -> None:
    sequences = branching(random.Random(5))
    assert_same(*learners(llama, max_tokens_per_microbatch=20, logits_at_once=64 * 3), sequences, Loss(name="gspo"))


def test_what_several_rows_begin_with_is_computed_once_for_an_update(pair: tuple[Learner, Learner]) -> None:
    rows = [
        sequence([1, 2, 3, 4, 5], [(3, 5)]),
        sequence([1, 2, 3, 6], [(3, 4)]),
        sequence([1, 2, 3, 4, 5, 7, 8], [(6, 7)]),
    ]
    for learner, tokens in zip(pair, (3 * 7, 8), strict=True):
        learner.forward_backward(rows, Loss())
        learner.optim_step(0.0, 1.0)  # with what other tests left
        learner.forward_backward(rows, Loss())
        assert learner.optim_step(0.0, 1.0)["learner_tokens"] == tokens
        assert learner.optim_step(0.0, 1.0)["learner_tokens"] == 0


def test_logprobs_in_a_tree_are_those_of_separate_rows(pair: tuple[Learner, Learner]) -> None:
    sequences = [*branching(random.Random(8)), sequence([5], []), sequence([5, 6], [])]
    padded, shared = (learner.logprobs(sequences) for learner in pair)
    for one, other in zip(padded, shared, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def attended(how: How, inputs: list[torch.Tensor]) -> torch.Tensor:
    built = build_tree([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [8]])
    mask = TreeMask(built, "cpu", how)
    found: torch.Tensor = tree_attention(torch.nn.Identity(), *inputs, None, tree=mask)[0]
    return found


def heads(width: int) -> list[torch.Tensor]:
    """Queries of four heads, keys and values of two, for the eight tokens of the tree."""
    torch.manual_seed(0)
    return [torch.randn(1, count, 8, width, requires_grad=True) for count in (4, 2, 2)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("width", [32, 8])
def test_flex_attention_attends_as_the_runs_do(width: int) -> None:
    inputs = [each.detach() for each in heads(width)]  # on a CPU it has no backward pass
    torch.testing.assert_close(attended("flex", inputs), attended("runs", inputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_tree_on_a_gpu_gives_the_gradients_of_separate_rows(build: Callable[..., Path]) -> None:
    folder = build("Llama", hidden_size=128)  # heads of 32 numbers
    assert_same(
        Learner(folder, learner_setup(device="cuda")),
        Learner(folder, learner_setup(device="cuda", packing="prefix_tree")),
        branching(random.Random(3)),
        Loss(),
    )


class Large(Learner):
    """Of a model that is not tiny."""

    def _packing(self, hardware: Hardware, tiny: bool) -> dict[str, Any]:
        return super()._packing(hardware, tiny=False)


@pytest.mark.parametrize(
    ("kind", "family", "changes", "computed"),
    [
        (Large, "Llama", {}, 5 + 3 * 2),
        (Large, "Mistral", {"sliding_window": 64}, 3 * 7),  # in which trees do not grow
        (Learner, "Llama", {}, 3 * 7),
    ],
)
def test_by_default_beginnings_are_computed_once_where_the_model_is_not_tiny(
    build: Callable[..., Path], kind: type[Learner], family: str, changes: dict[str, Any], computed: int
) -> None:
    learner = kind(build(family, **changes), learner_setup())
    rows = [sequence([2, 3, 4, 5, 6, 50 + i, 60 - i], [(5, 7)]) for i in range(3)]
    learner.forward_backward(rows, Loss())
    assert learner.optim_step(0.0, 1.0)["learner_tokens"] == computed


def test_a_model_or_a_setting_that_does_not_fit_is_refused_at_start(build: Callable[..., Path], llama: Path) -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        Learner(build("GPT2"), learner_setup(packing="prefix_tree"))
    with pytest.raises(ModelError, match="sliding window"):
        Learner(build("Mistral", sliding_window=8), learner_setup(packing="prefix_tree"))


def test_one_mask_for_the_whole_tree_attends_as_the_runs_do() -> None:
    inputs = heads(8)
    outs = [attended(how, inputs) for how in ("runs", "mask")]
    torch.testing.assert_close(*outs)
    grads = [torch.autograd.grad(out.square().sum(), inputs) for out in outs]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
