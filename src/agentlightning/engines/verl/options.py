"""Options of the verl engine, as data: verl's own configuration tree under our defaults. No verl is imported to state them.

The engine makes them from its setup and hands them to its child. Refuses to know what verl does with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.setup import EngineSetup
from agentlightning.engines.support import Support
from agentlightning.errors import ConfigError

SETTINGS = (
    *("options", "optimizer", "dtype", "device", "max_tokens_per_microbatch", "gradient_checkpointing"),
    *("listen", "advertise", "key_env"),
)
"""Settings of the table [engine] that the verl engine reads."""
KEYS: dict[str, tuple[str, ...]] = {
    "": ("python", "model_engine", "actor_rollout_ref", "trainer", "ray_kwargs"),
    "trainer": ("n_gpus_per_node", "nnodes"),
    "ray_kwargs": ("ray_init",),
    "actor_rollout_ref": ("hybrid_engine", "nccl_timeout", "model", "actor", "ref", "rollout"),
}
"""Keys of `options`: python is the interpreter, the others are verl's."""
OURS: dict[str, tuple[str, ...]] = {
    "model": ("path", "enable_gradient_checkpointing", "lora_rank", "lora"),
    "actor": (
        *("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
        *("use_dynamic_bsz", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "policy_loss"),
        *("loss_agg_mode", "loss_scale_factor", "entropy_coeff", "calculate_entropy", "use_kl_loss", "kl_loss_coef"),
        *("kl_loss_type", "ppo_epochs", "shuffle", "grad_clip", "checkpoint", "tau_pos", "tau_neg", "rollout_n"),
    ),
    "rollout": (
        *("temperature", "top_k", "top_p", "n", "do_sample", "prompt_length", "response_length", "val_kwargs", "agent"),
        *("multi_turn", "calculate_log_probs", "free_cache_engine", "enable_sleep_mode"),
    ),
}
"""Keys of verl below actor_rollout_ref that would have no effect: the loss, the batches and the calls are not verl's."""
DEVICE_DTYPE = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlOptions:
    """Options of the process that drives verl; see engines/verl/workers.py."""

    tree: dict[str, Any]
    """Values that take the place of verl's defaults."""
    model_engine: str = "dp"
    """verl's model engine: dp is FSDP."""
    reference: bool = False
    """Keep the weights that the engine was made with beside the policy's."""


def support(reference: bool) -> Support:
    """Capabilities of the verl engine: what needs a value head, images or masks of logits is not among them."""
    return Support(
        engine="verl",
        losses=frozenset({"ppo_clip", "gspo", "cispo", "reinforce", "sft"}),
        plugin_losses=True,
        corrections=True,
        entropy=True,
        kl=True,
        reference=reference,
        old_logprobs=True,
    )


def check_options(config: EngineConfig) -> None:
    """ConfigError, naming the key, where an option is not known or would have no effect."""
    if config.optimizer.type != "adamw":
        raise ConfigError(f"engine.optimizer: expected adamw with the engine 'verl', got {config.optimizer.type!r}")
    options = config.options
    for place, known in KEYS.items():
        table = options.get(place, {}) if place else options
        path = f"engine.options.{place}." if place else "engine.options."
        if not isinstance(table, Mapping):
            raise ConfigError(f"engine.options.{place}: expected a table, got {table!r}")
        for key in table:
            if key not in known:
                raise ConfigError(f"{path}{key} is not known to the engine 'verl'; expected one of {', '.join(known)}")
    for place, ours in OURS.items():
        for key in options.get("actor_rollout_ref", {}).get(place, {}):
            if key in ours:
                raise ConfigError(
                    f"engine.options.actor_rollout_ref.{place}.{key} has no effect or is not supported; the settings of "
                    "this package say what is trained and sampled, leave it out"
                )
    python = options.get("python")
    if python is not None and not (isinstance(python, str) and Path(python).expanduser().is_file()):
        raise ConfigError(
            f"engine.options.python: expected the path of an interpreter that has verl installed, got {python!r}"
        )


def verl_options(setup: EngineSetup, model: Path) -> VerlOptions:
    """Options for a model in a folder."""
    engine = setup.config
    given = engine.options
    actor: dict[str, Any] = {
        "use_dynamic_bsz": True,  # rows of any number, unlike verl's fixed micro-batches
        "ppo_max_token_len_per_gpu": engine.max_tokens_per_microbatch,
        "optim": {"lr": setup.learning_rate, "weight_decay": engine.optimizer.weight_decay, "betas": [0.9, 0.95]},
        "checkpoint": {
            "save_contents": ["model", "optimizer", "extra", "hf_model"],
            "load_contents": ["model", "optimizer", "extra"],
        },
    }
    ref: dict[str, Any] = {}
    # It samples while the policy learns, so that its weights and cache stay where they are.
    rollout: dict[str, Any] = {"name": "vllm", "tensor_model_parallel_size": 1, "free_cache_engine": False}
    rollout |= {"skip_tokenizer_init": False}  # stop texts are found in text
    model_engine = given.get("model_engine", "dp")
    if model_engine == "dp":
        actor["strategy"] = "fsdp2"
    if engine.dtype != "auto":
        rollout["dtype"] = engine.dtype
        for part in (actor, ref):
            if model_engine == "dp":
                precision = {"param_dtype": DEVICE_DTYPE[engine.dtype]}
                part["fsdp_config"] = {"dtype": engine.dtype, "mixed_precision": precision}
            else:
                part[model_engine] = {"dtype": engine.dtype}
    trainer: dict[str, Any] = {"n_gpus_per_node": 1, "nnodes": 1}
    if engine.device != "auto":
        trainer["device"] = engine.device
    ours = {
        "actor_rollout_ref": {
            "model": {"path": str(model), "enable_gradient_checkpointing": engine.gradient_checkpointing},
            "actor": actor,
            "ref": ref,
            "rollout": rollout,
        },
        "trainer": trainer,
    }
    tree = merged(ours, {key: value for key, value in given.items() if key not in ("python", "model_engine")})
    return VerlOptions(tree=tree, model_engine=model_engine, reference=setup.needs.reference)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees as one; where both have a value, `above` has it. {a: {x: 1, y: 2}}, {a: {y: 3}} -> {a: {x: 1, y: 3}}."""
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both
