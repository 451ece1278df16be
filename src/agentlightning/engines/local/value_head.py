"""The critic: a value head on the policy's own hidden states, with an optimizer of its own.

The learner drives it: it gives the states of the sampled tokens, and takes the gradient that goes on into the policy's
layers. Refuses to know rewards and how targets were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from agentlightning.engines.corrections import Tokens
from agentlightning.engines.losses import value_loss
from agentlightning.errors import EngineError
from agentlightning.training_types import Loss


class ValueHead:
    """value = w₂ · silu(W₁ h + b₁) + b₂, with h the state from which a token is drawn.

    A linear head cannot say "the relation that was asked for is the one of the question", which is what success hangs on;
    one hidden layer, as wide as the states, can. It starts at 0 everywhere. Weights are float32. learning_rate_ratio is
    its learning rate over the one given to `step`; there is no weight decay.
    """

    def __init__(self, width: int, *, learning_rate_ratio: float, device: str, seed: int) -> None:
        self._ratio = learning_rate_ratio
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first, last = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)
        self._head = torch.nn.Sequential(first, torch.nn.SiLU(), last).to(device)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        self._losses: list[Tensor] = []

    def values(self, states_NX: Tensor) -> Tensor:
        """[N], in units of reward."""
        values_N: Tensor = self._head(states_NX.float())[:, 0]
        return values_N

    def backward(self, states_NX: Tensor, tokens: Tokens, loss: Loss) -> None:
        """Add the gradient of SUM of weight × value loss; that of the states is scaled by loss.value.

        EngineError where tokens have no returns, or no values to clip at.
        """
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
        """Clip the accumulated gradient to the norm; what it was before.

        Apart from the policy's: a critic that is far off would leave nothing of that.
        """
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
