"""Plug-ins of the user's own, those of examples/own_algorithm among them: found, checked, and in effect."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reference_table import trajectory

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.losses import RatioMask
from agentlightning.algorithms.settings import name_of
from agentlightning.config.file import named_files
from agentlightning.config.run import Config, parse_config
from agentlightning.engines.losses import Tokens, token_loss
from agentlightning.errors import AgentError, ConfigError
from agentlightning.runtime.code_loader import path_of_code
from agentlightning.trainer.schedules import algorithms_of
from agentlightning.training_types import Loss

FILE = Path(__file__).parents[2] / "examples" / "own_algorithm" / "own_algorithm.py"
GROUPS = [[trajectory(name) for name in group] for group in (("a0", "a1", "a2"), ("b0", "b1"))]


def own(name: str) -> str:
    return f"{FILE}:{name}"


def config(**algorithm: Any) -> Config:
    table = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t.jsonl"}, "algorithm": algorithm}
    return parse_config(table)


def advantages(algorithm: LightningRL) -> dict[str, list[float]]:
    [rows] = algorithm.plan(GROUPS, seed=0).minibatches
    return {
        row.rollout_id: [one for one, sampled in zip(row.advantages, row.mask, strict=True) if sampled] for row in rows
    }


def test_an_advantage_gets_the_groups_and_their_credits_and_its_settings() -> None:
    algorithm = LightningRL(advantage={"type": own("median"), "scale": 2.0}, minibatches=1)  # type: ignore[arg-type]
    found = advantages(algorithm)  # medians 0.5 and 0.6
    assert found["a0"] == [1.0] * 5
    assert found["a1"] == [-1.0]
    assert found["b1"] == pytest.approx([-0.8] * 5)
    assert "a2" not in found  # an advantage of 0 has no signal


def test_the_advantage_of_the_example_leaves_out_what_a_credit_rule_leaves_out() -> None:
    algorithm = LightningRL(credit="last", advantage=own("median"))
    for row in (row for group in GROUPS for row in algorithm.advantages(group)):
        assert not any(row[:-1])


def test_a_credit_rule_and_an_aggregation_are_combined_with_built_in_parts() -> None:
    algorithm = LightningRL(
        credit={"type": own("first"), "others": 0.0},  # type: ignore[arg-type]
        advantage="reinforce",
        aggregation=own("root_length"),
        minibatches=1,
    )
    assert advantages(algorithm)["a0"] == [1.0, 1.0]  # the rest has no signal
    [rows] = algorithm.plan(GROUPS, seed=0).minibatches
    weights = {row.rollout_id: [one for one in row.weights if one] for row in rows}
    assert weights["a0"] == pytest.approx([1 / (5 * math.sqrt(5))] * 2)


def sapo(r: float, advantage: float, negative: float) -> float:
    tau = 1.0 if advantage > 0 else negative
    return -4 / tau / (1 + math.exp(-tau * (r - 1))) * advantage


def loss_and_gradient(loss: Loss) -> tuple[float, list[float], torch.Tensor]:
    now = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    now.requires_grad_()
    tokens = Tokens(
        torch.log(torch.tensor([0.4, 0.4, 0.05])), torch.tensor([1.0, -2.0, 1.0]), torch.tensor([0.5, 0.25, 0.25]),
        calls=torch.tensor([0, 0, 1]),
    )  # fmt: skip
    distributions = torch.stack([now, torch.log1p(-now.exp())], 1)
    total, report = token_loss(loss, distributions, torch.zeros(3, dtype=torch.int64), tokens)
    (gradient,) = torch.autograd.grad(total, now)
    return float(total.detach()), gradient.tolist(), report


def test_a_loss_of_one_s_own_has_weights_masks_and_a_gradient_as_the_others_have() -> None:
    """Ratios 1.25, 0.75 and 4, which the mask leaves out."""
    sapo_loss: Any = {"type": own("sapo"), "negative": 2.0}
    algorithm = LightningRL(loss=sapo_loss, correction=RatioMask(level="call", high=3.0))
    terms = algorithm.loss_terms
    assert terms.settings == {"positive": 1.0, "negative": 2.0}
    total, gradient, _ = loss_and_gradient(terms)
    assert total == pytest.approx(0.5 * sapo(1.25, 1.0, 2.0) + 0.25 * sapo(0.75, -2.0, 2.0))
    step = 1e-4
    slope = 0.5 * (sapo(1.25 * math.exp(step), 1.0, 2.0) - sapo(1.25 * math.exp(-step), 1.0, 2.0)) / (2 * step)
    assert gradient[0] == pytest.approx(slope, rel=1e-3)
    assert gradient[2] == 0.0


RULE = "from agentlightning.algorithms.credit import credit_rule\n@credit_rule('own', each='{}')\ndef own({}): ...\n"
CLASS = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "from agentlightning.algorithms import LightningRL\n@dataclass(frozen=True, kw_only=True)\nclass own(LightningRL):\n    "
)
LOSS, CREDIT = "def own(logprobs, tokens):\n    ", "def own(trajectory, group):\n    return "
ADVANTAGE = "def own(groups, credits):\n    return "


@pytest.mark.parametrize(
    ("setting", "code", "error", "sentence"),
    [
        (
            "loss",
            f"{LOSS}return logprobs.sum()",
            ConfigError,
            r"py:own': expected a tensor of shape \(3,\), .* got \(\)",
        ),
        ("loss", f"{LOSS}return logprobs.detach()", ConfigError, "what it returned has no gradient"),
        ("loss", f"{LOSS}return 3", ConfigError, r"expected a tensor of shape \(3,\), a value per token, got int"),
        ("loss", f"{LOSS}return logprobs * float('nan')", ConfigError, "py:own': expected finite numbers, got nan"),
        ("loss", f"{LOSS}raise SystemExit(3)", AgentError, r"loss '.*own.py:own' failed: SystemExit: 3"),
        (
            "loss",
            "def own(logprobs, tokens, *, s: 'No' = 1): ...",
            ConfigError,
            "annotation .* name 'No' is not defined",
        ),
        ("credit", f"{CREDIT}[1.0]", ConfigError, "one entry for each of 2 transitions of rollout a0, got 1"),
        ("credit", f"{CREDIT}[1.0, float('nan')]", ConfigError, r"finite numbers for rollout a0, got \[1.0, nan\]"),
        ("credit", f"{CREDIT}None", ConfigError, "of 2 transitions of rollout a0, got NoneType"),
        ("credit", f"{CREDIT}[1 / 0]", AgentError, "failed: ZeroDivisionError"),
        ("credit", RULE.format("step", "groups"), ConfigError, r"callable as \(groups, evidence\)"),
        ("credit", RULE.format("group", "one, group"), ConfigError, r"callable as \(group\)"),
        ("credit", RULE.format("trajectory", "group"), ConfigError, r"callable as \(trajectory, group\)"),
        ("advantage", f"{ADVANTAGE}[[[1.0]]]", ConfigError, "one entry for each of 2 groups, got 1"),
        (
            "advantage",
            f"{ADVANTAGE}[[[float('inf')] * len(c.values) for c in g] for g in credits]",
            ConfigError,
            "expected finite numbers for call a0/0",
        ),
        ("advantage", f"{ADVANTAGE}1 / 0", AgentError, "failed: ZeroDivisionError"),
        ("type", f"{CLASS}extra: int", ConfigError, r"algorithm\.extra: is required by '.*own.py:own'"),
        ("type", f"{CLASS}extra: No = 1", ConfigError, r"own: an annotation of a setting .* \(NameError: .*No"),
        ("type", f"{CLASS}def __post_init__(self): raise ValueError('odd')", ConfigError, "type: .*ValueError: odd"),
        ("type", f"{CLASS}def plan(self): ...", ConfigError, r"type '.*own.py:own'.*\(self, groups, seed, .*\)"),
        ("agents", "", ConfigError, "there is no 'own'"),
    ],
)
def test_what_is_wrong_with_code_of_one_s_own_is_said_with_its_place(
    tmp_path: Path, setting: str, code: str, error: type[Exception], sentence: str
) -> None:
    (tmp_path / "own.py").write_text(code)
    named = f"{tmp_path}/own.py:own"

    def train() -> None:
        algorithms_of(config(**{setting: [named] if setting == "agents" else named}))["default"].plan(GROUPS, seed=0)
        loss_and_gradient(Loss(name=named))

    with pytest.raises(error, match=sentence):
        train()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tau": 1.0}, "algorithm.loss.tau: no such setting; known here: positive, negative"),
        ({"positive": 0}, "algorithm.loss.positive: expected a number greater than 0, got 0"),
        ({"clip_low": 0.1}, "algorithm.loss.clip_low: no such setting"),
    ],
)
def test_settings_of_a_loss_are_checked_at_start(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        algorithms_of(config(loss={"type": own("sapo"), **settings}))


@pytest.mark.parametrize("setting", ["loss", "advantage", "aggregation", "credit", "type"])
def test_a_plug_in_that_is_not_there_or_not_of_its_kind_is_refused_at_start(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no 'nobody'; there are .*HardTasks"):
        algorithms_of(config(**{setting: own("nobody")}))
    with pytest.raises(ConfigError, match=f"algorithm.{setting}: expected one of .*, or file.py:name of your own, got"):
        algorithms_of(config(**{setting: "nobody"}))
    with pytest.raises(ConfigError, match="expected"):
        algorithms_of(config(**{setting: own("HardTasks" if setting == "aggregation" else "root_length")}))


def test_an_engine_that_loads_no_code_refuses_a_loss_of_one_s_own() -> None:
    from agentlightning.engines.base import Support, check_loss

    with pytest.raises(ConfigError, match="does not support plug-in losses"):
        check_loss(Support(engine="e"), Loss(name=own("sapo")))


def test_an_algorithm_is_a_class_with_settings_and_a_plan_of_its_own() -> None:
    algorithm = algorithms_of(config(type=own("HardTasks"), too_easy=0.55, minibatches=1))["default"]
    plan = algorithm.plan(GROUPS, seed=0)  # the groups' means are 0.5 and 0.6
    assert {row.rollout_id for rows in plan.minibatches for row in rows} == {"a0", "a1"}
    assert plan.outcomes["b0"] == "zero_variance"
    assert plan.resample == []
    unrewarded = [replace(GROUPS[0][2], reward=math.nan), *GROUPS[0][:2]]
    sampling = replace(algorithm, dynamic_sampling=True, too_easy=0.6)
    assert sampling.plan([unrewarded], seed=0).outcomes == {"a0": "trained", "a1": "trained", "a2": "invalid"}
    assert replace(sampling, too_easy=0.55).plan(GROUPS, seed=0).resample == ["b"]
    with pytest.raises(ConfigError, match=r"algorithm\.too_eazy: no such setting"):
        algorithms_of(config(type=own("HardTasks"), too_eazy=0.5))


def test_functions_and_classes_are_given_from_python_and_found_again_by_their_file() -> None:
    from agentlightning.runtime.code_loader import load_file

    module = load_file(FILE, "example")
    algorithm = LightningRL(
        advantage=module.median, loss=module.sapo, aggregation=module.root_length, credit=module.first
    )
    assert (name_of(algorithm.advantage), name_of(algorithm.loss)) == (own("median"), own("sapo"))
    assert path_of_code(module.HardTasks, "name") == own("HardTasks")
    with pytest.raises(ConfigError, match="cannot be found again by another process"):
        LightningRL(loss=lambda logprobs, tokens: -logprobs)  # type: ignore[arg-type]


def test_an_installed_package_names_plug_ins_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_losses.py").write_text(
        "def plain(logprobs, tokens, *, c: float = 1.0):\n    return -c * tokens.advantages * logprobs\n"
    )
    info = tmp_path / "their-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentlightning.losses]\nplain = their_losses:plain\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    terms = LightningRL(loss={"type": "plain", "c": 2.0}).loss_terms  # type: ignore[arg-type]
    found, _, _ = loss_and_gradient(terms)
    assert found == pytest.approx(2 * loss_and_gradient(Loss(name="reinforce"))[0])
    assert named_files(config(loss="plain")) == {"algorithm.loss": tmp_path / "their_losses.py"}
    assert named_files(config(loss={"type": "plain"})) == {"algorithm.loss.type": tmp_path / "their_losses.py"}
    (info / "entry_points.txt").unlink()
    loss_and_gradient(terms)  # a learner looks it up with every piece of a micro-batch: packages are scanned once


def test_a_learner_refuses_a_loss_whose_file_was_edited_after_the_trainer_had_loaded_it(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text("def loss(logprobs, tokens):\n    return -tokens.advantages * logprobs\n")
    terms = LightningRL(loss=f"{file}:loss").loss_terms
    loss_and_gradient(terms)
    file.write_text("def loss(logprobs, tokens):\n    return tokens.advantages * logprobs\n")
    assert LightningRL(loss=f"{file}:loss").loss_terms == terms  # this process has what it imported
    code = (
        "import sys; from agentlightning.engines.losses import plugin_loss; from agentlightning.training_types import Loss\n"
        f"plugin_loss(Loss(name={terms.name!r}, code_hash={terms.code_hash!r}), None, None)"
    )
    learner = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "edited.py:loss': its file was changed after the trainer had loaded it" in learner.stderr


def test_what_a_loss_does_to_its_arguments_harms_nobody(tmp_path: Path) -> None:
    file = tmp_path / "rude.py"
    file.write_text(
        "def tidy(logprobs, tokens):\n    return -tokens.advantages * logprobs\n"
        "def rude(logprobs, tokens):\n    found = tidy(logprobs, tokens)\n    tokens.weights.zero_()\n"
        "    logprobs.data.zero_()\n    return found\n"
    )
    tidy, rude = (loss_and_gradient(Loss(name=f"{file}:{name}", entropy=0.1)) for name in ("tidy", "rude"))
    assert rude[0] == tidy[0]
