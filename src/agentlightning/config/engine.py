"""Settings of the table ``[engine]``: the parts that sample and learn. Engines give them their meaning."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from agentlightning.config.base import BaseUrl, Table, Tagged, checked_folder_url, matching


class LocalSampler(Table):
    """A process on this machine, made for small models and exact streams."""

    type: Literal["local"] = "local"

    @property
    def count(self) -> int:
        """Number of servers, as of every sampler."""
        return 1


def _checked_weights(weights: str) -> str:
    if weights in ("reload", "lora") or re.fullmatch(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])", weights):
        return weights
    try:
        return checked_folder_url(weights)
    except ValueError as wrong:
        raise ValueError(
            f"expected reload, lora, http://HOST of this machine, or the URL of a folder: {wrong}"
        ) from wrong


Weights = Annotated[str, AfterValidator(_checked_weights)]
"""The way of new weights to vLLM servers. ``reload``: from a folder whose path they share; ``lora``: the adapter alone, from
there; ``http://HOST``: from this machine, which they know as HOST; ``s3://…``, ``abfs://…``, ``file:///…``: from there."""


class VllmSampler(Table):
    """vLLM servers that are started on this machine, in vLLM's own Python environment."""

    type: Literal["vllm"] = "vllm"
    python: str = Field(min_length=1)
    """Interpreter of an environment in which vLLM is installed."""
    gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server, such as ``["1", "2,3"]``; none: one server, which sees what this process sees."""
    arguments: tuple[str, ...] = ()
    """More of their command lines, such as ``["--max-model-len", "8192"]``."""
    weights: Weights = "reload"

    @property
    def count(self) -> int:
        return max(1, len(self.gpus))


class VllmServerSampler(Table):
    """vLLM servers that run already and sample as equals."""

    type: Literal["vllm_server"] = "vllm_server"
    urls: tuple[BaseUrl, ...] = Field(min_length=1)
    weights: Weights = "reload"

    @property
    def count(self) -> int:
        return len(self.urls)


class LocalLearner(Table):
    """One process on this machine."""

    type: Literal["local"] = "local"


class FsdpLearner(Table):
    """Processes on this machine that train one model, each with a device and a part of the weights."""

    type: Literal["fsdp"] = "fsdp"
    processes: int = Field(ge=2)
    """With CUDA as many GPUs."""


class AdamW(Table):
    """Loshchilov and Hutter (2019), Decoupled Weight Decay Regularization, with betas 0.9 and 0.95."""

    type: Literal["adamw"] = "adamw"
    weight_decay: float = Field(0.0, ge=0)


class AdamW8bit(AdamW):
    """AdamW whose two moments take a byte each, by bitsandbytes."""

    type: Literal["adamw_8bit"] = "adamw_8bit"  # type: ignore[assignment]


class Muon(AdamW):
    """Muon for the matrices of the layers, AdamW for the rest."""

    type: Literal["muon"] = "muon"  # type: ignore[assignment]
    learning_rate: float | None = Field(None, gt=0)
    """Of the matrices; None: 20/3 of trainer.learning_rate, which the others have."""


class EngineConfig(Table):
    """The engine that samples and trains: device, memory, optimizer."""

    name: str = Field("local", min_length=1)
    """local, verl, or an engine of another package: the name of its entry point, or ``package.module:Engine``."""
    options: dict[str, Any] = Field({})
    """An engine's own settings, which it checks."""
    sampler: Annotated[LocalSampler | VllmSampler | VllmServerSampler, Tagged()] = LocalSampler()
    learner: Annotated[LocalLearner | FsdpLearner, Tagged()] = LocalLearner()
    optimizer: Annotated[AdamW | AdamW8bit | Muon, Tagged()] = AdamW()
    lora_rank: int | None = Field(None, ge=1)
    """Train a low-rank adapter of this rank in place of all weights; it counts twice."""
    dropout: float = Field(0.0, ge=0, lt=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, else float32; the learner keeps weights and optimizer in float32."""
    device: str = Field("auto", min_length=1)
    """Torch device of sampler and learner; auto: cuda, mps, cpu, the first that there is."""
    max_tokens_per_microbatch: int = Field(4096, ge=1)
    """Tokens of one backward pass, padding included, at most: bounds memory."""
    packing: Literal["padded", "prefix_tree"] = "padded"
    """prefix_tree: the learner computes once what sequences of a micro-batch begin with alike."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations."""
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

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if isinstance(self.learner, FsdpLearner) and isinstance(self.optimizer, AdamW8bit):
            raise ValueError(
                "optimizer: adamw_8bit does not go with learner = 'fsdp', whose processes share the moments out; expected "
                "adamw or muon"
            )
        if self.lora_rank is not None and isinstance(self.optimizer, Muon):
            raise ValueError("optimizer: muon is for whole matrices, not for the two factors of lora_rank; take adamw")
        if not isinstance(self.sampler, LocalSampler) and self.sampler.weights == "lora" and self.lora_rank is None:
            raise ValueError("sampler.weights: lora needs lora_rank")
        given = self.listen is not None or self.max_num_seqs != EngineConfig.model_fields["max_num_seqs"].default
        if isinstance(self.sampler, VllmServerSampler) and given:
            raise ValueError("listen and max_num_seqs are for samplers that are started here, not for vllm_server")
        if self.dropout and (self.packing == "prefix_tree" or self.gradient_checkpointing):
            raise ValueError(
                "dropout: goes neither with packing = 'prefix_tree' nor with gradient_checkpointing; expected 0"
            )
        # What was given is not repeated: somebody may have pasted the key.
        if self.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ValueError("key_env: expected the name of an environment variable, such as SAMPLER_KEY, not the key")
        if (self.key_env or "").startswith("AGL_"):
            raise ValueError("key_env: a variable of Agent Lightning's own (AGL_…) is not sent anywhere")
        return self
