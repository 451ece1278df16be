"""Routes: which version of a served model a new session gets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.config.canary import CanaryConfig
from agentlightning.config.serve import HeaderRoute, RoutesConfig
from agentlightning.errors import ConfigError
from agentlightning.gateway.sessions.routes import choose_version, is_shadowed, pinned_alias
from agentlightning.records import RetryPolicy, Rollout, Sampling

WEIGHTS = st.floats(0, 1)


def canary(weight: float) -> RoutesConfig:
    return RoutesConfig(stable=40, canary=50, weight=weight)


@given(st.text(), WEIGHTS)
def test_the_same_session_gets_the_same_version(session: str, weight: float) -> None:
    assert choose_version(session, canary(weight)) == choose_version(session, canary(weight))


@given(st.text(), WEIGHTS, WEIGHTS)
def test_a_larger_weight_keeps_the_sessions_that_the_smaller_one_chose(session: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    if choose_version(session, canary(low)) == 50:
        assert choose_version(session, canary(high)) == 50


@given(st.text())
def test_nobody_gets_a_canary_of_no_weight_and_everybody_one_of_full_weight(session: str) -> None:
    assert choose_version(session, canary(0.0)) == 40
    assert choose_version(session, canary(1.0)) == 50


def test_the_weight_is_the_share_of_sessions() -> None:
    chosen = [choose_version(f"session-{number}", canary(0.1)) for number in range(10_000)]
    assert 900 < chosen.count(50) < 1100  # three standard deviations are 90


@given(st.text())
def test_a_header_chooses_the_canary_whatever_its_weight(session: str) -> None:
    routes = RoutesConfig(stable=40, canary=50, header=HeaderRoute(name="X-Beta", value="1"))
    assert choose_version(session, routes, [(b"x-beta", b"1")]) == 50
    assert choose_version(session, routes, [(b"x-beta", b"0")]) == 40


def test_a_weight_without_a_canary_is_an_error() -> None:
    with pytest.raises(ConfigError, match="weight, header, rule and shadow: have no effect without canary"):
        RoutesConfig(stable=40, weight=0.5)


@pytest.mark.parametrize(
    "share", [{"weight": 0.5}, {"header": HeaderRoute(name="x", value="1")}, {"rule": CanaryConfig()}]
)
def test_a_canary_gets_sessions_or_copies_of_calls(share: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shadow: conflicts with weight, header and rule"):
        RoutesConfig(stable=40, canary=50, shadow=0.5, **share)


def test_the_shadow_is_the_share_of_sessions() -> None:
    routes = RoutesConfig(stable=40, canary=50, shadow=0.1)
    copied = [is_shadowed(f"session-{number}", routes) for number in range(10_000)]
    assert 900 < copied.count(True) < 1100  # three standard deviations are 90


def test_only_sessions_are_pinned() -> None:
    rollout = Rollout(
        id="r",
        run_id="run",
        task={"model": "my-model@40"},
        group_id="session:tok:anna",
        kind="session",
        replica=0,
        mode="train",
        step=40,
        sampling=Sampling(),
        retry=RetryPolicy(),
        priority=0,
        state="running",
        attempt=1,
        lost=0,
        created_ns=0,
    )
    assert pinned_alias(rollout) == "my-model-40"
    other = {**{name: getattr(rollout, name) for name in rollout.__slots__}, "kind": "task"}
    assert pinned_alias(Rollout(**other)) is None
