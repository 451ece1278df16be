"""How the work is shared out to ranks, and what they refuse before they meet."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.config.run import parse_config
from agentlightning.engines.base import EngineNeeds
from agentlightning.engines.local.batches import Batch, batches
from agentlightning.engines.local.sharding import Ranks
from agentlightning.errors import ConfigError, EngineError
from agentlightning.testing.engine_contract import sequence
from agentlightning.trainer.processes import engine_support
from agentlightning.training_types import TrainingSequence
from build import learner_setup

LENGTHS = [5, 9, 30, 12, 12, 40, 7]


def rows() -> list[TrainingSequence]:
    return [sequence([3 + i % 2, *range(4, 3 + length)], [(1, length)]) for i, length in enumerate(LENGTHS)]


def share(given: list[TrainingSequence], rank: int, ranks: int, packing: Any, budget: int = 45) -> list[Batch]:
    options = learner_setup(packing=packing, max_tokens_per_microbatch=budget)
    return list(batches(given, options.config, "cpu", rank=rank, ranks=ranks))


@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 10])
def test_every_sequence_is_one_rank_s_and_all_have_as_many_micro_batches(packing: str, ranks: int) -> None:
    given = rows()
    shares = [share(given, rank, ranks, packing) for rank in range(ranks)]
    assert len({len(found) for found in shares}) == 1
    dealt = [s for found in shares for one in found for s in one.sequences]
    assert sorted(map(id, dealt)) == sorted(map(id, given))
    assert all(one.tokens_BT.numel() >= 1 for found in shares for one in found)


def test_what_begins_alike_is_one_rank_s_where_it_is_computed_once() -> None:
    given = [sequence([first, *range(10, 40), last], [(31, 32)]) for last in range(40, 44) for first in (5, 6)]
    for rank in range(2):
        (found,) = share(given, rank, 2, "prefix_tree", 4096)
        assert found.tokens_BT.numel() == 31 + 4


def test_one_alone_raises_its_errors_at_once_and_has_what_it_gathers() -> None:
    alone = Ranks()
    assert alone.gather(3) == [3]
    with pytest.raises(EngineError, match="at once"), alone.keep_errors():
        raise EngineError("at once")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_ranks_need_a_gpu_each(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.learner.processes: 1000 need .* got '{device}'"):
        Ranks(0, 1000).device(device)


def test_images_are_not_declared_by_a_learner_of_several_processes() -> None:
    table = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
    several = parse_config(table | {"engine": {"learner": {"type": "fsdp", "processes": 2}}})
    assert [engine_support(config, EngineNeeds()).images for config in (parse_config(table), several)] == [True, False]
