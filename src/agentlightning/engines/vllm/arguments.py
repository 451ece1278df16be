"""The command line of a vLLM server that the engine starts, from its settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.url_folder import UrlFolder
from agentlightning.errors import ConfigError

POLICY = "policy"
"""Name under which such servers know the model."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""


def check_settings(config: EngineConfig) -> None:
    """ConfigError where a setting would have no effect on vLLM servers, or where they cannot be started."""
    assert config.vllm is not None
    plain = EngineConfig()
    if config.sampler_threads != plain.sampler_threads:
        raise ConfigError("engine.sampler_threads has no effect with sampler = 'vllm'; leave it out")
    for name in ("max_num_seqs", "kv_cache_memory_gb", "listen"):
        if config.vllm.urls and getattr(config, name) != getattr(plain, name):
            raise ConfigError(f"engine.{name} has no effect with engine.vllm.urls: those servers run already")
    if config.vllm.weights_url is not None:
        UrlFolder(config.vllm.weights_url)  # MissingExtraError where its scheme needs a package
    if config.vllm.python is not None and shutil.which(config.vllm.python) is None:
        raise ConfigError(
            f"engine.vllm.python: {config.vllm.python} is no program here; expected the interpreter of an environment in "
            "which vLLM is installed"
        )


def server_arguments(config: EngineConfig, model: Path) -> list[str]:
    """Arguments after the program's name."""
    assert config.vllm is not None
    arguments = ["--model", str(model), "--served-model-name", POLICY, "--max-num-seqs", str(config.max_num_seqs)]
    # What the learner rebuilds: log-probabilities after temperature, cuts and masks, with llguidance's masks.
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    arguments += ["--structured-outputs-config", json.dumps({"backend": "guidance"})]
    arguments += ["--disable-uvicorn-access-log"]
    if config.dtype != "auto":
        arguments += ["--dtype", config.dtype]
    if config.kv_cache_memory_gb is not None:
        arguments += ["--kv-cache-memory-bytes", str(int(config.kv_cache_memory_gb * 1e9))]
    arguments += ["--worker-extension-cls", "agentlightning_vllm.worker.WeightsWorker"]
    if config.vllm.weights == "transfer":
        arguments += ["--weight-transfer-config", json.dumps({"backend": "agentlightning"})]
    if config.vllm.weights == "lora":
        assert config.lora is not None
        rank = next((known for known in LORA_RANKS if known >= config.lora.rank), config.lora.rank)
        arguments += ["--enable-lora", "--max-lora-rank", str(rank)]
    return [*arguments, *config.vllm.arguments]
