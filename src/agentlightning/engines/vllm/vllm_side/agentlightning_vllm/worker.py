"""New weights in vLLM's workers: read from a folder, or fetched by a URL, as a backend of vLLM's weight transfer.

vLLM loads this module with --worker-extension-cls agentlightning_vllm.worker.WeightsWorker, and takes the backend with
--weight-transfer-config '{"backend": "agentlightning"}'. A fetch that fails, or brings other bytes than were announced,
leaves the weights as they were.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from .fetch import fetch

NAME = "agentlightning"


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: every update brings its own address."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    url: str = ""
    key: str = ""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 by the name of each safetensors file."""


class UrlTransfer(WeightTransferEngine):  # type: ignore[misc]
    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: Update) -> None:
        with tempfile.TemporaryDirectory() as place:
            files = list(_fetched(update_info, Path(place)))
            # From here to the end the model has no weights, so nothing below may wait for anybody.
            initialize_layerwise_reload(self.model)
            self.model.load_weights(_tensors(files))
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_heads(self.model)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


class WeightsWorker:
    """Methods that vLLM's workers get besides their own."""

    model_runner: Any

    def reload_published(self, folder: str) -> None:
        self.model_runner.reload_weights(weights_path=folder)
        _repack_heads(self.model_runner.get_model())


def _repack_heads(model: Any) -> None:
    """On a CPU a head computes with a packed copy of its weights, which a reload forgets where they are the embedding's."""
    if current_platform.is_cpu():
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)


def _fetched(update: Update, place: Path) -> Iterator[Path]:
    for name, expected in update.files.items():
        fetch(f"{update.url}/{name}", place / name, expected, update.key)
        yield place / name


def _tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, UrlTransfer)
