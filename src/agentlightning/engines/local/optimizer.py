"""Optimizers of the policy and of the critic's value head; the learner drives them, and one learning rate scales all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from agentlightning.config.engine import BETAS, AdamW, Muon
from agentlightning.engines.local.sharding import part as part_of
from agentlightning.engines.local.sharding import whole
from agentlightning.engines.losses import Tokens, value_loss
from agentlightning.errors import EngineError
from agentlightning.training_types import Loss

MUON_RATIO = 20 / 3
"""Muon's learning rate over AdamW's: its update has the size of the matrix, AdamW's that of the rate."""


class Optimizer:
    """One or two torch optimizers behind one learning rate. "muon" (Jordan et al., 2024: momentum 0.95, Nesterov, 5
    Newton-Schulz steps; torch.optim.Muon) is for the two-dimensional parameters of layers."""

    def __init__(self, model: torch.nn.Module, config: AdamW, learning_rate: float) -> None:
        """learning_rate: the one that `step` is given before any schedule."""
        embedding = {
            id(p) for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in [module.weight]
        }
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        own = [p for n, p in trained if p.ndim == 2 and id(p) not in embedding and "lm_head" not in n]
        own = own if isinstance(config, Muon) else []
        chosen = {id(p) for p in own}
        rest = [p for _, p in trained if id(p) not in chosen]
        decay, betas = config.weight_decay, config.betas or BETAS
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if rest:
            self._parts.append((torch.optim.AdamW(rest, lr=0.0, betas=betas, weight_decay=decay, fused=True), 1.0))
        if own and isinstance(config, Muon):
            muon = torch.optim.Muon(own, lr=0.0, momentum=0.95, nesterov=True, weight_decay=decay, ns_steps=5)
            ratio = MUON_RATIO if config.learning_rate is None else config.learning_rate / learning_rate
            self._parts.append((muon, ratio))

    def step(self, learning_rate: float) -> None:
        for part, ratio in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate * ratio
            part.step()

    def state(self, keep: bool = True) -> list[Any]:
        """Whole, the same of one process and of several; of no use without `keep`, see `sharding.whole`."""
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


class ValueHead:
    """value = w₂ · silu(W₁ h + b₁) + b₂, with h the state from which a token is drawn.

    One hidden layer, as wide as the states: a linear head cannot compare the question with the answer. It starts at 0
    everywhere, in float32. learning_rate_ratio is its learning rate over the one given to `step`; no weight decay.
    """

    def __init__(
        self, width: int, betas: tuple[float, float], *, learning_rate_ratio: float, device: str, seed: int
    ) -> None:
        self._ratio = learning_rate_ratio
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first, last = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)
        self._head = torch.nn.Sequential(first, torch.nn.SiLU(), last).to(device)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=0.0, betas=betas, weight_decay=0.0)
        self._losses: list[Tensor] = []

    def values(self, states_NX: Tensor) -> Tensor:
        """[N], in units of reward."""
        values_N: Tensor = self._head(states_NX.float())[:, 0]
        return values_N

    def backward(self, states_NX: Tensor, tokens: Tokens, loss: Loss) -> None:
        """Add the gradient of SUM of weight × value loss; that of the states is scaled by loss.value. EngineError without
        returns, or values to clip at."""
        if loss.value is None:
            raise EngineError("the loss does not train the critic; expected loss.value")
        if tokens.returns is None:
            raise EngineError("the loss trains the critic, and its sequences have no returns")
        if loss.value_clip is not None and tokens.values is None:
            raise EngineError("value_clip needs sequences with the values of before the update")
        # value: as the states are; gradient: as much as loss.value says
        inputs_NX = states_NX.detach()
        if loss.value:
            inputs_NX = inputs_NX + loss.value * (states_NX - inputs_NX)
        losses_N = value_loss(self.values(inputs_NX), tokens.returns, tokens.values, loss.value_clip)
        total = (tokens.weights * losses_N).sum()
        total.backward()  # type: ignore[no-untyped-call]
        self._losses.append(total.detach())

    def report(self) -> float:
        """The SUM of losses since the last report."""
        total = float(torch.stack(self._losses).sum()) if self._losses else 0.0
        self._losses.clear()
        return total

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self._head.parameters()

    def clip(self, norm: float) -> float:
        """Clip the accumulated gradient, apart from the policy's, of which a critic far off would leave nothing; its
        norm."""
        return float(torch.nn.utils.clip_grad_norm_(self._head.parameters(), norm))

    def step(self, learning_rate: float) -> None:
        """Update and forget the gradient."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * self._ratio
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the accumulated gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.forget()
