"""Prompt optimisation: searches over the texts of an agent's prompts. Pure; rollouts and models are handed in."""

from collections.abc import Mapping
from types import MappingProxyType

from agentlightning.algorithms.prompts.optimizers import APO, GEPA
from agentlightning.algorithms.prompts.search import PromptAlgorithm

PROMPT_ALGORITHMS: Mapping[str, type[PromptAlgorithm]] = MappingProxyType({kind.name: kind for kind in (GEPA, APO)})
"""The built-in searches by name."""

__all__ = ["APO", "GEPA", "PROMPT_ALGORITHMS", "PromptAlgorithm"]
