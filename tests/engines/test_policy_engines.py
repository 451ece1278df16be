"""Several policies as one engine: every verb reaches the engine of its policy, and they live and die together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, PolicyEngines, Support
from agentlightning.errors import EngineError
from agentlightning.training_types import Loss, TrainingSequence


class Noting:
    """An engine that notes what it is asked."""

    def __init__(self, name: str, log: list[tuple[str, ...]], fails: str = "", support: Support | None = None) -> None:
        self._name = name
        self._log = log
        self._fails = fails
        self.support = support or Support(engine="noting")

    def __getattr__(self, verb: str) -> Any:
        async def noted(*arguments: Any) -> Any:
            self._log.append((self._name, verb, *map(str, arguments)))
            if verb == self._fails:
                raise EngineError(f"{self._name} cannot {verb}")
            if verb == "watch":
                await asyncio.Event().wait()
            started = {DEFAULT_POLICY: Endpoints(urls=[f"http://{self._name}"])}
            return started if verb == "start" else {"loss": 1.0}

        return noted


def both(**options: Any) -> tuple[PolicyEngines, list[tuple[str, ...]]]:
    log: list[tuple[str, ...]] = []
    return PolicyEngines({"white": Noting("white", log, **options), "black": Noting("black", log)}), log


NOTHING: Sequence[TrainingSequence] = []


async def test_every_verb_goes_to_the_engine_of_the_policy_it_names() -> None:
    engines, log = both()
    await engines.forward_backward(NOTHING, Loss(), "black")
    await engines.optim_step(0.1, 1.0, "white")
    await engines.publish(7, "black")
    await engines.save(Path("there"), "white")
    await engines.load(Path("there"), "black")
    for verb in (engines.logprobs, engines.reference_logprobs, engines.values):
        await verb(NOTHING, "white")
    assert [entry[:2] for entry in log] == [
        ("black", "forward_backward"),
        ("white", "optim_step"),
        ("black", "publish"),
        ("white", "save"),
        ("black", "load"),
        ("white", "logprobs"),
        ("white", "reference_logprobs"),
        ("white", "values"),
    ]


async def test_a_policy_that_is_not_there_is_an_error_that_lists_the_others() -> None:
    engines, _ = both()
    with pytest.raises(EngineError, match="'red' is not known to the engine; expected one of white, black"):
        await engines.publish(1, "red")


async def test_each_policy_has_endpoints_of_its_own() -> None:
    engines, _ = both()
    urls = {alias: served.urls for alias, served in (await engines.start()).items()}
    assert urls == {"white": ["http://white"], "black": ["http://black"]}


@pytest.mark.parametrize(("fails", "then"), [("start", "close"), ("restart_learner", "restart_learner")])
async def test_where_one_fails_the_others_do_the_same(fails: str, then: str) -> None:
    """One that does not start closes all; where one learner is lost all are started again."""
    engines, log = both(fails=fails)
    with pytest.raises(EngineError, match=f"white cannot {fails}"):
        await getattr(engines, fails)()
    assert {entry for entry in log if entry[1] == then} == {("white", then), ("black", then)}


async def test_a_watch_ends_with_the_first_engine_that_cannot_be_kept() -> None:
    engines, _ = both(fails="watch")
    with pytest.raises(EngineError, match="white cannot watch"):
        await engines.watch()


def test_several_engines_can_do_what_all_of_them_can() -> None:
    engines, _ = both(support=Support(engine="other", losses=frozenset({"gspo", "sft"}), terms=True))
    assert engines.support.losses == {"sft"}
    assert not engines.support.terms
    assert engines.support.engine == "noting and other"
