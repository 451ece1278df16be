"""Settings of the table ``[engine]``: the parts that sample and learn. Engines give them their meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from agentlightning.config.base import BaseUrl, Table, Tagged, matching
from agentlightning.config.external import external_name


class LocalSampler(Table):
    """A process on this machine, made for small models and exact streams."""

    type: Literal["local"] = "local"

    @property
    def count(self) -> int:
        """Number of servers, as of every sampler."""
        return 1


class VllmSampler(Table):
    """vLLM servers that are started on this machine, in vLLM's own Python environment."""

    type: Literal["vllm"] = "vllm"
    python: str = Field(min_length=1)
    """Interpreter of an environment in which vLLM is installed."""
    gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each server, such as ``["1", "2,3"]``; none: one server, which sees what this process sees."""
    arguments: tuple[str, ...] = ()
    """More of their command lines, such as ``["--max-model-len", "8192"]``."""

    @property
    def count(self) -> int:
        return max(1, len(self.gpus))


class VllmServerSampler(Table):
    """vLLM servers that run already and sample as equals."""

    type: Literal["vllm_server"] = "vllm_server"
    urls: tuple[BaseUrl, ...] = Field(min_length=1)
    weights: Annotated[
        str, matching(r"reload|http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])", "reload, or http://HOST of this machine")
    ] = "reload"
    """The way of new weights to them: from a folder whose path they share, or from this machine, known to them as HOST."""

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


UnitShare = Annotated[float, Field(ge=0, lt=1)]
BETAS = (0.9, 0.95)
"""AdamW's in an engine whose settings name none; a run names those of `trainer.defaults`."""


class AdamW(Table):
    """Loshchilov and Hutter (2019), Decoupled Weight Decay Regularization."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[UnitShare, UnitShare] | None = None
    """Decay of the mean gradient and of the mean square. None: 0.9 and 0.999, for tiny models 0.95 (`trainer.defaults`)."""
    weight_decay: float = Field(0.0, ge=0)


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
    optimizer: Annotated[AdamW | Muon, Tagged()] = AdamW()
    lora_rank: int | None = Field(None, ge=1)
    """Train a low-rank adapter of this rank in place of all weights; it counts twice."""
    dropout: float = Field(0.0, ge=0, lt=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the device computes it, but for tiny models on a CPU. Weights and optimizer stay float32."""
    device: str = Field("auto", min_length=1)
    """Torch device of sampler and learner; auto: cuda, mps, cpu, the first that there is."""
    max_tokens_per_microbatch: int = Field(4096, ge=1)
    """Tokens of one backward pass, padding included, at most: bounds memory. On a CPU fewer where memory is short."""
    packing: Literal["auto", "padded", "prefix_tree"] = "auto"
    """prefix_tree: the learner computes once what sequences of a micro-batch begin with alike; auto: that, on a CPU, for
    models that it fits and that are not tiny."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations."""
    max_num_seqs: int = Field(64, ge=1)
    """Requests sampled at a time: on a CPU few enough for the cache."""
    listen: Annotated[str, matching(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):[1-9]\d{0,4}", "HOST:PORT")] | None = None
    """``HOST:PORT`` at which the (first) sampler listens, for gateways on other hosts. None: a free port of this machine."""
    advertise: tuple[BaseUrl, ...] = ()
    """Base URLs at which gateways reach its samplers, one for each, where they are not those at which they listen."""
    key_env: str | None = None
    """Variable of the environment, here and at the server, with the key that samplers ask gateways for."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.lora_rank is not None and isinstance(self.optimizer, Muon):
            raise ValueError("optimizer: muon is for whole matrices, not for the two factors of lora_rank; take adamw")
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


class PolicyConfig(Table):
    """One of several policies: what differs from the tables [model], [algorithm], [engine]."""

    model: str | None = None
    """Hub name or local folder. None: model.path."""
    frozen: bool = False
    """Sampled as it is, and never trained."""
    snapshot_of: str | None = None
    """Never trained, and sampled with the weights that this trained policy had at an earlier checkpoint of the run; before
    its first one with those that it started from."""
    window: int = Field(1, ge=1)
    """Number of the latest checkpoints of which each step draws the one that `snapshot_of` samples."""
    learning_rate: float | None = Field(None, gt=0)
    """None: trainer.learning_rate."""
    algorithm: dict[str, Any] = Field({})
    engine: dict[str, Any] = Field({})

    @property
    def trains(self) -> bool:
        """False for an opponent."""
        return not self.frozen and self.snapshot_of is None


def trained_policies(policies: Mapping[str, PolicyConfig]) -> dict[str, PolicyConfig]:
    """Those that are no opponents."""
    return {alias: own for alias, own in policies.items() if own.trains}


def check_policies(policies: Mapping[str, PolicyConfig], keep_checkpoints: int) -> None:
    """ValueError for a wrong name, and for settings that would have no effect."""
    trained = trained_policies(policies)
    if policies and not trained:
        raise ValueError("policies: expected at least one that is trained, without frozen or snapshot_of")
    for alias, own in policies.items():
        if own.model is not None and external_name(own.model) is not None:
            raise ValueError(f"policies.{alias}.model: expected a model that can be trained, got {own.model!r}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", alias):
            raise ValueError(f"policies.{alias}: expected a name of letters, digits, '.', '_' and '-'")
        if own.trains:
            if own.window != 1:
                raise ValueError(f"policies.{alias}.window: has no effect without snapshot_of")
            continue
        _check_opponent(alias, own)
        if own.snapshot_of is not None:
            if own.snapshot_of not in trained:
                raise ValueError(
                    f"policies.{alias}.snapshot_of: expected a policy that is trained ({', '.join(trained)}), "
                    f"got {own.snapshot_of!r}"
                )
            if own.window > keep_checkpoints:
                raise ValueError(
                    f"policies.{alias}.window: expected at most trainer.keep_checkpoints, {keep_checkpoints}, since "
                    f"older weights are deleted; got {own.window}"
                )


def _check_opponent(alias: str, own: PolicyConfig) -> None:
    why = "frozen" if own.frozen else "snapshot_of"
    if own.frozen and own.snapshot_of is not None:
        raise ValueError(f"policies.{alias}: frozen conflicts with snapshot_of; give one of the two")
    ignored = {"learning_rate": own.learning_rate is not None, "algorithm": bool(own.algorithm)}
    ignored |= {"model": own.model is not None, "window": False} if own.snapshot_of else {"window": own.window != 1}
    for name, given in ignored.items():
        if given:
            raise ValueError(f"policies.{alias}.{name}: has no effect with {why}")
