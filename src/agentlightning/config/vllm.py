"""Settings of the table ``[engine.vllm]``: the vLLM servers that sample. What they mean is `engines/vllm`'s affair."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentlightning.config.base import BaseUrl, FolderUrl, Table


class VllmConfig(Table):
    """vLLM servers: running ones, by their URLs, or ones that are started here in vLLM's own Python environment."""

    urls: tuple[BaseUrl, ...] = ()
    """Running servers, which sample as equals."""
    python: str | None = Field(None, min_length=1)
    """Interpreter of an environment in which vLLM is installed: servers are started with it on this machine."""
    replicas: int = Field(1, ge=1)
    """Servers to start."""
    gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each of them, such as ``["1", "2,3"]``; none: what this process sees."""
    arguments: tuple[str, ...] = ()
    """More of their command lines, such as ``["--max-model-len", "8192"]``."""
    weights: Literal["reload", "transfer", "lora"] = "reload"
    """reload: servers read the folder of new weights, whose path they share; transfer: they fetch it by HTTP or from an
    object store; lora: they read the adapter of engine.lora alone."""
    weights_host: str = Field("127.0.0.1", min_length=1)
    """With transfer: address of this machine at which servers fetch weights."""
    weights_url: FolderUrl | None = None
    """With transfer, in place of weights_host: folder of an object store or a shared disk that servers fetch from."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if bool(self.urls) == (self.python is not None):
            raise ValueError("expected either urls, of running servers, or python, to start some")
        own = {"replicas": self.replicas != 1, "gpus": self.gpus, "arguments": self.arguments}
        if self.urls and (ignored := [name for name, given in own.items() if given]):
            raise ValueError(f"{ignored[0]} has no effect with urls: those servers run already")
        if self.gpus and len(self.gpus) != self.replicas:
            raise ValueError(f"gpus: expected one entry for each of {self.replicas} replicas, got {len(self.gpus)}")
        own_host = self.weights_host != VllmConfig.model_fields["weights_host"].default
        if self.weights != "transfer" and (own_host or self.weights_url is not None):
            name = "weights_host" if own_host else "weights_url"
            raise ValueError(f"{name} has no effect with weights = {self.weights!r}")
        if own_host and self.weights_url is not None:
            raise ValueError(
                "weights_host has no effect with weights_url, from which servers fetch; give one of the two"
            )
        return self
