"""The random-reward control of the examples: a coin in the place of the reward."""

from __future__ import annotations

import random
from typing import Any

SUCCESS = 0.25


def coin(task: dict[str, Any], result: Any) -> float:
    return float(random.random() < SUCCESS)
