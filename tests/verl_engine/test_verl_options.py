"""What a table [engine] becomes for verl, and what of it is refused; no verl is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.config.run import EngineConfig
from agentlightning.engines.base import EngineNeeds, EngineSetup, check_loss, check_preference_loss
from agentlightning.engines.verl.engine import VerlEngine, verl_options
from agentlightning.errors import ConfigError
from agentlightning.training_types import Loss, PreferenceLoss


def setup_of(options: dict[str, Any], **settings: Any) -> EngineSetup:
    config = EngineConfig(name="verl", options={"python": sys.executable, **options}, **settings)
    return EngineSetup(model="m", work_dir=Path("w"), config=config, needs=EngineNeeds(reference=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"critic": {}}, r"engine\.options\.critic is not known"),
        ({"trainer": {"total_epochs": 3}}, r"engine\.options\.trainer\.total_epochs is not known"),
        ({"trainer": 2}, r"engine\.options\.trainer: expected a table"),
        ({"actor_rollout_ref": {"actor": {"clip_ratio": 0.1}}}, r"actor\.clip_ratio has no effect"),
        ({"actor_rollout_ref": {"rollout": {"temperature": 0.7}}}, r"rollout\.temperature has no effect"),
        ({"python": "/no/such/python"}, r"engine\.options\.python: expected the path"),
    ],
)
def test_an_option_that_is_not_known_or_has_no_effect_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        VerlEngine(setup_of(options))


def test_a_setting_that_verl_does_not_read_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"engine\.dropout has no effect with the engine 'verl'"):
        VerlEngine(setup_of({}, dropout=0.1))


def test_options_stand_above_our_defaults_and_leave_the_others() -> None:
    rollout = {"name": "sglang", "gpu_memory_utilization": 0.3}
    found = verl_options(setup_of({"actor_rollout_ref": {"rollout": rollout}, "model_engine": "megatron"}), Path("m"))
    assert found.model_engine == "megatron"
    assert found.tree["actor_rollout_ref"]["rollout"] == {
        **rollout,
        "tensor_model_parallel_size": 1,
        "free_cache_engine": False,
        "skip_tokenizer_init": False,
    }
    assert found.tree["trainer"] == {"n_gpus_per_node": 1, "nnodes": 1}


def test_float32_is_the_type_of_weights_updates_and_sampling() -> None:
    tree = verl_options(setup_of({}, dtype="float32"), Path("m")).tree["actor_rollout_ref"]
    precise = {"dtype": "float32", "mixed_precision": {"param_dtype": "fp32"}}
    assert [tree["actor"]["fsdp_config"], tree["ref"]["fsdp_config"], tree["rollout"]["dtype"]] == [
        precise,
        precise,
        "float32",
    ]


def test_critics_and_preferences_are_refused_by_name_and_every_loss_of_tokens_is_not() -> None:
    support = VerlEngine(setup_of({})).support
    for name in ("ppo_clip", "gspo", "cispo", "reinforce", "sft"):
        check_loss(support, Loss(name=name))
    with pytest.raises(ConfigError, match="'verl' does not support a critic"):
        check_loss(support, Loss(value=0.1))
    with pytest.raises(ConfigError, match="'verl' does not support the loss 'dpo'"):
        check_preference_loss(support, PreferenceLoss())
