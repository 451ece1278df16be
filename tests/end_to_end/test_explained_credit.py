"""A real run whose steps are trained by one algorithm of each family: what is explained is what the steps recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Folder
from training import Training

from agentlightning.analysis.reward_debugger import explain_rollout
from agentlightning.console.app import draw
from agentlightning.console.reader import Reader
from agentlightning.console.render import Templates
from agentlightning.store.open import open_store

pytestmark = pytest.mark.slow

FAMILIES = [
    ("uniform", "grpo"),
    ("discounted", "rloo"),
    ("gigpo", "reinforce_pp_baseline"),
    ("learned", "grpo"),
    ("counterfactual", "maxrl"),
    ("decisive", "reinforce"),
]
"""Credit rule and advantage of each step: group baselines, one over all others, whitened over the batch, none; credit by
outcome, by time, by state, within the group, and by earlier steps."""


async def test_explanations_are_what_the_steps_of_a_real_run_recorded(folder: Folder, model: Path) -> None:
    training = Training(folder, model)
    config = (folder.path / "run.toml").read_text()
    for step, (credit, advantage) in enumerate(FAMILIES[1:], 2):
        config += f'[[algorithm.schedule]]\nfrom_step = {step}\ncredit = "{credit}"\nadvantage = "{advantage}"\n'
    folder.write("run.toml", config)
    assert await training.ended(training.start("--set", "eval.every=0")) == 0, training.output
    async with open_store(training.store) as store:
        steps = await store.steps(training.run_id)
        assert len(steps) == len(FAMILIES)
        signals = []
        for step in steps:
            learned = [one.rollout_id for one in step.consumed if one.outcome in ("trained", "zero_variance")]
            recorded = {one.call_id: one for one in await store.credit(learned)}
            for rollout_id in learned[::3]:  # of every group
                found = await explain_rollout(store, rollout_id)
                assert (found.step, found.consumed) == (step.step, True)
                for call in found.rollout.calls:
                    kept = recorded[call.call_id]
                    assert (call.credit, call.advantage) == pytest.approx((kept.credit, kept.advantage), abs=1e-6)
                    assert kept.token_advantages == pytest.approx([call.advantage] * len(kept.token_advantages))
                    signals.append((step.step, call.advantage))
        assert {step for step, advantage in signals if advantage} == set(range(1, len(FAMILIES) + 1))
        reader = Reader(store)
        query = {"run": [training.run_id], "view": ["distribution"]}
        html, _ = await draw(reader, Templates(), "/rewards", query)
        assert f"rollouts of steps 1, 2, 3, 4, 5, {len(FAMILIES)}" in html
        reader.close()
