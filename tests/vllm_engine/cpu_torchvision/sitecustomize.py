"""Has torchvision import beside a CPU build of torch, for which its operators were not compiled: part of .venv-vllm, whose
vLLM uses none of them."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class Operators(importlib.abc.MetaPathFinder):
    """Declares, as torchvision is imported, the operators that it describes without asking whether they were loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self._library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self._library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules["torchvision_operators"] = self  # type: ignore[assignment]  # they go with the library


sys.meta_path.insert(0, Operators())
