"""Options of the local engine's sampler and learner, as data: no torch is imported to state them.

Made from an engine's setup; the engine hands them to its children. Refuses to know what they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentlightning.config.engine import LoraConfig
from agentlightning.engines.setup import EngineSetup
from agentlightning.engines.support import Support

WEIGHTS_KEY = "weights_key"
"""Name of the sampler's secret, which opens its route for weights."""

SETTINGS = (
    *("optimizer", "muon_learning_rate", "weight_decay", "dropout", "dtype", "device", "lora", "train_vision_tower"),
    *("kv_cache_memory_gb", "max_tokens_per_microbatch", "packing", "gradient_checkpointing", "max_num_seqs"),
    *("sampler_threads", "learner_threads", "sampler", "vllm", "learner", "learner_processes", "listen"),
    *("advertise", "key_env"),
)
"""Settings of the table [engine] that the local engine reads."""

WeightsForm = Literal["weights", "sealed", "adapter"]
"""Form in which samplers get weights: a transformers folder; one with its manifest, sealed; the adapter alone, sealed."""

Dtype = Literal["auto", "float32", "bfloat16"]
"""auto: bfloat16 on CUDA, else float32; a device auto: cuda, mps, cpu, the first that there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOptions:
    """Options of the sampler process; see engines/local/sampler.py."""

    threads: int = 1
    max_num_seqs: int = 64
    """Completions sampled at a time; more wait."""
    kv_cache_memory_gb: float | None = None
    """Bound of keys and values; None: 4, on CUDA a fifth of the device's memory."""
    dtype: Dtype = "float32"
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A low-rank adapter instead of all weights; see engines/local/adapter.py."""

    rank: int = 16
    alpha: int = 32
    """The adapter's product counts alpha / rank times."""
    dora: bool = False
    """Train the length of each row of a weight apart from its direction."""
    targets: tuple[str, ...] = ()
    """Last names of the layers to adapt, such as q_proj; none: every linear layer but the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """Options of the learner process; see engines/local/learner.py."""

    processes: int = 1
    """Ranks, each with a device and a part of the weights (FSDP2); see engines/local/ranks.py."""
    threads: int | None = 1
    """CPU threads; None: as many as there are idle cores, looked at between micro-batches. Another number gives another
    rounding."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    muon_learning_rate_ratio: float = 20 / 3
    """Muon's learning rate over the one given to optim_step."""
    max_tokens_per_microbatch: int = 4096
    """Padded tokens; with prefix trees unique ones."""
    dropout: float = 0.0
    dtype: Dtype = "float32"
    device: str = "cpu"
    seed: int = 0
    packing: Literal["padded", "prefix_tree"] = "padded"
    """prefix_tree: prefixes that sequences of a micro-batch share are computed once."""
    reference: bool = False
    """Keep a frozen copy of the model's weights, whatever is loaded later: for KL and for preferences."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass, and keep no activations."""
    lora: Lora | None = None
    """Train an adapter; the reference is then the model without it, whatever `reference` says."""
    train_vision_tower: bool = False
    """Of a model with sight, train the vision tower too; the projector and the language model always are."""
    critic_learning_rate_ratio: float | None = None
    """Keep a value head; its learning rate over the one given to optim_step."""


def support(learner: LearnerOptions) -> Support:
    """Capabilities of the local engine with these options."""
    return Support(
        engine="local",
        losses=frozenset({"ppo_clip", "gspo", "cispo", "reinforce", "sft"}),
        preferences=frozenset() if learner.dropout else frozenset({"dpo", "kto"}),
        plugin_losses=True,
        corrections=True,
        entropy=True,
        kl=True,
        reference=learner.reference or learner.lora is not None,
        old_logprobs=True,
        token_numbers=True,
        masks=True,
        images=learner.processes == 1,
        values=learner.critic_learning_rate_ratio is not None,
        serves=True,
    )


def sampler_options(setup: EngineSetup) -> SamplerOptions:
    """Options of the sampler of an engine."""
    engine = setup.config
    return SamplerOptions(
        threads=engine.sampler_threads,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_memory_gb=engine.kv_cache_memory_gb,
        dtype=engine.dtype,
        device=engine.device,
    )


def learner_options(setup: EngineSetup) -> LearnerOptions:
    """Options of the learner of an engine."""
    engine, rate, critic_rate = setup.config, setup.learning_rate, setup.needs.critic_learning_rate
    return LearnerOptions(
        processes=engine.learner_processes or 1,
        threads=engine.learner_threads,
        optimizer=engine.optimizer,
        muon_learning_rate_ratio=(engine.muon_learning_rate or rate) / rate,
        weight_decay=engine.weight_decay,
        max_tokens_per_microbatch=engine.max_tokens_per_microbatch,
        dropout=engine.dropout,
        dtype=engine.dtype,
        device=engine.device,
        seed=setup.seed,
        packing=engine.packing,
        reference=setup.needs.reference,
        critic_learning_rate_ratio=None if critic_rate is None else critic_rate / rate,
        gradient_checkpointing=engine.gradient_checkpointing,
        lora=_lora(engine.lora),
        train_vision_tower=engine.train_vision_tower,
    )


def _lora(given: LoraConfig | None) -> Lora | None:
    if given is None:
        return None
    return Lora(rank=given.rank, alpha=given.alpha or 2 * given.rank, dora=given.dora, targets=given.targets)
