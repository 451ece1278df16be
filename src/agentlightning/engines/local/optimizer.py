"""AdamW, AdamW with states of 8 bits, or Muon for the matrices of the layers and AdamW for the rest.

The learner drives it. Refuses to know gradients' origin; one learning rate scales every group.
"""

from __future__ import annotations

from typing import Any

import torch

from agentlightning.engines.local.options import LearnerOptions
from agentlightning.engines.local.sharding import part as part_of
from agentlightning.engines.local.sharding import whole
from agentlightning.errors import MissingExtraError


class Optimizer:
    """One or two torch optimizers behind one learning rate.

    With "muon" (Jordan et al., 2024: momentum 0.95, Nesterov, 5 Newton-Schulz steps; torch.optim.Muon), two-dimensional
    parameters of layers get muon_learning_rate_ratio × the learning rate: an update of Muon has the size of the matrix, one
    of AdamW has the size of the rate. With "adamw_8bit" AdamW's two moments take a byte each (Dettmers et al., 2022, 8-bit
    Optimizers via Block-wise Quantization; bitsandbytes), but for embeddings, whose gradients are too uneven for it (there,
    section 2.3).
    """

    def __init__(self, model: torch.nn.Module, options: LearnerOptions) -> None:
        name, weight_decay = options.optimizer, options.weight_decay
        betas = options.betas[0], options.betas[1]  # a list where they came as JSON
        embedding = {
            id(p) for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in [module.weight]
        }
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        own = {"adamw": [], "adamw_8bit": trained, "muon": [(n, p) for n, p in trained if p.ndim == 2]}[name]
        inner = [p for n, p in own if id(p) not in embedding and "lm_head" not in n]
        chosen = {id(p) for p in inner}
        rest = [p for _, p in trained if id(p) not in chosen]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if rest:
            plain = torch.optim.AdamW(rest, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)
            self._parts.append((plain, 1.0))
        if inner and name == "muon":
            muon = torch.optim.Muon(inner, lr=0.0, momentum=0.95, nesterov=True, weight_decay=weight_decay, ns_steps=5)
            self._parts.append((muon, options.muon_learning_rate_ratio))
        elif inner:
            self._parts.append((_adamw_8bit(inner, betas, weight_decay), 1.0))

    def step(self, learning_rate: float) -> None:
        for part, ratio in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate * ratio
            part.step()

    def state(self, keep: bool = True) -> list[Any]:
        """The same of one process and of several, whole; without `keep` of no use, see `sharding.whole`."""
        found = []
        for part, _ in self._parts:
            saved = part.state_dict()
            moments = {
                at: {name: whole(value, keep) for name, value in own.items()} for at, own in saved["state"].items()
            }
            found.append({**saved, "state": moments})
        return found

    def load(self, state: list[Any]) -> None:
        for (part, _), saved in zip(self._parts, state, strict=True):
            parameters = [p for group in part.param_groups for p in group["params"]]
            moments = {
                at: {name: part_of(value, parameters[at]) for name, value in own.items()}
                for at, own in saved["state"].items()
            }
            part.load_state_dict({**saved, "state": moments})


def _adamw_8bit(
    parameters: list[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """MissingExtraError without bitsandbytes; where a tensor is small, it keeps 32 bits by itself."""
    try:
        import bitsandbytes
    except ImportError as cause:
        raise MissingExtraError("bitsandbytes", "adamw8bit") from cause
    found: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        parameters, lr=0.0, betas=betas, weight_decay=weight_decay
    )
    return found
