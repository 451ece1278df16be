"""Settings of the table ``[engine]``: what samples and learns. What they mean is the engine's affair."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from agentlightning.config.base import BaseUrl, Table, matching
from agentlightning.config.vllm import VllmConfig


class LoraConfig(Table):
    """A low-rank adapter that is trained instead of all weights."""

    rank: int = Field(16, ge=1)
    alpha: int | None = Field(None, ge=1)
    """The adapter counts alpha / rank times; None: twice."""
    dora: bool = False
    """Train the length of each row of a weight apart from its direction."""
    targets: tuple[str, ...] = ()
    """Last names of the layers to adapt, such as q_proj; none: every linear layer but the head."""


class EngineConfig(Table):
    """The engine that samples and trains: device, memory, optimizer."""

    name: str = Field("local", min_length=1)
    """local, or an engine of another package: the name of its entry point, or ``package.module:Engine``."""
    options: dict[str, Any] = Field({})
    """An engine's own settings, which it checks."""
    sampler: Literal["local", "vllm"] = "local"
    vllm: VllmConfig | None = None
    learner: Literal["local", "fsdp"] = "local"
    """fsdp: learner_processes processes on this machine train one model, each with a device and a part of the weights."""
    learner_processes: int | None = Field(None, ge=2)
    """Number of them; with CUDA as many GPUs. Only with learner = 'fsdp'."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    muon_learning_rate: float | None = Field(None, gt=0)
    """Learning rate of the matrices under muon; the others take trainer.learning_rate."""
    weight_decay: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, else float32; the learner keeps weights and optimizer in float32."""
    device: str = Field("auto", min_length=1)
    """Torch device of sampler and learner; auto: cuda, mps, cpu, the first that there is."""
    kv_cache_memory_gb: float | None = Field(None, gt=0)
    """Bound of the sampler's keys and values: what does not fit waits. None: 4, on CUDA a fifth of the device's memory."""
    max_tokens_per_microbatch: int = Field(4096, ge=1)
    """Tokens of one backward pass, padding included, at most: bounds memory."""
    packing: Literal["padded", "prefix_tree"] = "padded"
    """prefix_tree: the learner computes once what sequences of a micro-batch begin with alike."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations."""
    lora: LoraConfig | None = None
    train_vision_tower: bool = False
    """Of a model with sight, train the vision tower too; the projector and the language model always are."""
    max_num_seqs: int = Field(64, ge=1)
    """Requests sampled at a time: on a CPU few enough for the cache."""
    listen: Annotated[str, matching(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):[1-9]\d{0,4}", "HOST:PORT")] | None = None
    """``HOST:PORT`` of this machine at which its sampler listens, for gateways on other hosts; of several samplers, the
    first. None: a free port that this machine alone reaches."""
    advertise: tuple[BaseUrl, ...] = ()
    """Base URLs at which gateways reach its samplers, one for each, where those are not the addresses at which they listen:
    of a container, of a proxy with TLS."""
    key_env: str | None = None
    """Variable of the environment, here and at the server, with the key that samplers ask gateways for."""
    sampler_threads: int = Field(1, ge=1)
    learner_threads: int | None = Field(None, ge=1)
    """None: as many as there are cores that nobody else uses while it learns."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if (self.learner == "fsdp") != (self.learner_processes is not None):
            needed = "is needed" if self.learner == "fsdp" else "has no effect"
            raise ValueError(f"learner_processes {needed} with learner = {self.learner!r}")
        if self.learner == "fsdp" and self.optimizer == "adamw_8bit":
            raise ValueError(
                "optimizer: adamw_8bit does not go with learner = 'fsdp', whose processes share the moments out; expected "
                "adamw or muon"
            )
        if self.optimizer == "muon" and self.muon_learning_rate is None:
            raise ValueError("muon_learning_rate is needed with optimizer = 'muon'")
        if self.optimizer != "muon" and self.muon_learning_rate is not None:
            raise ValueError(f"muon_learning_rate has no effect with optimizer = {self.optimizer!r}")
        if (self.vllm is not None) != (self.sampler == "vllm"):
            raise ValueError("vllm: expected this table with sampler = 'vllm', and with no other sampler")
        if self.vllm is not None and self.vllm.weights == "lora" and (self.lora is None or self.lora.dora):
            raise ValueError("vllm.weights: lora needs the table engine.lora, without dora")
        # What was given is not repeated: somebody may have pasted the key.
        if self.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ValueError("key_env: expected the name of an environment variable, such as SAMPLER_KEY, not the key")
        if self.advertise and self.listen is None:
            raise ValueError("advertise has no effect without listen")
        if (self.key_env or "").startswith("AGL_"):
            raise ValueError("key_env: a variable of Agent Lightning's own (AGL_…) is not sent anywhere")
        if self.lora is not None and self.optimizer == "muon":
            raise ValueError(
                "optimizer: muon is for whole matrices, not for the two factors of engine.lora; take adamw"
            )
        if self.dropout and (self.packing == "prefix_tree" or self.gradient_checkpointing):
            raise ValueError(
                "dropout: goes neither with packing = 'prefix_tree' nor with gradient_checkpointing; expected 0"
            )
        return self
