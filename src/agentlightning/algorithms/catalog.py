"""Catalog: what `[algorithm]` may name, with the source and the settings of each.

``agl train --list-algorithms`` prints it: built-in parts, parts of installed packages, and of files that a run names.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from agentlightning.algorithms.credit import CREDIT
from agentlightning.algorithms.credit.rule import Rule
from agentlightning.algorithms.critic import Gae
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.losses import Cispo, FixedLength, Gspo, PpoClip
from agentlightning.algorithms.offline import DPO, KTO, RFT, SFT, Distill
from agentlightning.algorithms.prompts import PROMPT_ALGORITHMS
from agentlightning.errors import AgentLightningError
from agentlightning.runtime.code_loader import PluginKind, installed_plugins, is_code, load_plugin

SOURCES: Mapping[PluginKind, Mapping[str, str]] = MappingProxyType(
    {
        "algorithm": {
            "lightning_rl": "Luo et al. 2025, Agent Lightning, arXiv 2508.03680",
            "sft": "cross-entropy of demonstrations",
            "rft": "Yuan et al. 2023, arXiv 2308.01825",
            "distill": "Kim and Rush 2016, arXiv 1606.07947",
            "dpo": "Rafailov et al. 2023, arXiv 2305.18290",
            "kto": "Ethayarajh et al. 2024, arXiv 2402.01306",
            "gepa": "Agrawal et al. 2025, arXiv 2507.19457",
            "apo": "Pryzant et al. 2023, ProTeGi, arXiv 2305.03495",
        },
        "credit": {
            "uniform": "Luo et al. 2025, arXiv 2508.03680",
            "last": "Sutton and Barto 2018, equation 3.8, γ = 0",
            "discounted": "Sutton and Barto 2018, equation 3.8",
            "step_rewards": "Sutton and Barto 2018, section 13.4; Zeng et al. 2025, arXiv 2505.11821",
            "gigpo": "Feng et al. 2025, arXiv 2505.10978",
            "grouped_gae": "GAGPO, Zhu et al. 2026, arXiv 2605.13217",
            "forked": "VinePPO, Kazemnejad et al. 2024, arXiv 2410.01679",
            "tree": "Tree-GRPO, Ji et al. 2025, arXiv 2509.21240",
            "counterfactual": "Foerster et al. 2018, COMA, arXiv 1705.08926",
            "learned": "Efroni et al. 2021, arXiv 2008.06036; RUDDER, arXiv 1806.07857",
            "judge": "RULER (OpenPipe 2025); Zheng et al. 2023, arXiv 2306.05685",
            "decisive": "ours; its statistic Kelley 1935, epsilon squared",
        },
        "advantage": {
            "grpo": "Shao et al. 2024, DeepSeekMath, arXiv 2402.03300",
            "dr_grpo": "Liu et al. 2025, arXiv 2503.20783",
            "rloo": "Ahmadian et al. 2024, arXiv 2402.14740",
            "reinforce": "Williams 1992",
            "reinforce_pp": "Hu et al. 2025, arXiv 2501.03262",
            "reinforce_pp_baseline": "Hu et al. 2025, arXiv 2501.03262",
            "maxrl": "Tajwar et al. 2026, arXiv 2602.02710",
            "gae": "Schulman et al. 2016, arXiv 1506.02438; Wang et al. 2025, arXiv 2510.16907",
        },
        "loss": {
            "ppo_clip": "Schulman et al. 2017, arXiv 1707.06347; bounds of DAPO, arXiv 2503.14476",
            "gspo": "Zheng et al. 2025, arXiv 2507.18071",
            "cispo": "MiniMax 2025, arXiv 2506.13585",
            "reinforce": "Williams 1992",
        },
        "aggregation": {
            "token_mean": "DAPO, Yu et al. 2025, arXiv 2503.14476",
            "sequence_mean": "Shao et al. 2024, arXiv 2402.03300; GSPO",
            "rollout_mean": "the same over whole rollouts",
            "fixed_length": "Dr. GRPO, Liu et al. 2025, arXiv 2503.20783",
        },
    }
)
"""Source of every built-in part."""
TABLES = {kind.model_fields["type"].default: kind for kind in (Gae, PpoClip, Gspo, Cispo, FixedLength)}
"""Built-in parts with settings, by name."""
CLASSES = (LightningRL, SFT, RFT, Distill, DPO, KTO, *PROMPT_ALGORITHMS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One part that `[algorithm]` may name."""

    kind: PluginKind
    name: str
    where: str
    """built-in, the package that installed it, or file."""
    source: str
    settings: tuple[str, ...]
    """With their defaults, as name = value; of an algorithm their names."""


def catalog() -> Iterator[CatalogEntry]:
    """The built-in parts, then those of installed packages; one that cannot be loaded has the reason as its source."""
    for kind, sources in SOURCES.items():
        for name, source in sources.items():
            yield CatalogEntry(kind=kind, name=name, where="built-in", source=source, settings=_built_in(kind, name))
    for kind in SOURCES:
        for name, entry in installed_plugins(kind).items():
            package = entry.dist.name if entry.dist is not None else "installed"
            yield _described(kind, name, package)


def named_in(table: Mapping[str, Any]) -> Iterator[CatalogEntry]:
    """The parts of files that a table [algorithm] names, its schedule included."""
    seen: set[tuple[str, str]] = set()
    for part in (table, *(one for one in table.get("schedule", []) if isinstance(one, Mapping))):
        for kind in SOURCES:
            found = part.get("type" if kind == "algorithm" else kind)
            name = found.get("type") if isinstance(found, Mapping) else found
            if isinstance(name, str) and is_code(name) and (kind, name) not in seen:
                seen.add((kind, name))
                yield _described(kind, name, "file")


def _described(kind: PluginKind, name: str, where: str) -> CatalogEntry:
    try:
        found = load_plugin(kind, name, ())
    except AgentLightningError as error:
        return CatalogEntry(kind=kind, name=name, where=where, source=f"cannot be loaded: {error}", settings=())
    documented = found.function if isinstance(found, Rule) else found
    source = (inspect.getdoc(documented) or "").partition("\n")[0]
    return CatalogEntry(kind=kind, name=name, where=where, source=source, settings=settings_of(found))


def _built_in(kind: PluginKind, name: str) -> tuple[str, ...]:
    if kind == "credit":
        return settings_of(CREDIT[name])
    if kind == "algorithm":
        return settings_of(next(one for one in CLASSES if getattr(one, "name", "lightning_rl") == name))
    fields = TABLES[name].model_fields if name in TABLES else {}
    return tuple(
        one if field.is_required() else f"{one} = {field.default!r}" for one, field in fields.items() if one != "type"
    )


def settings_of(part: Any) -> tuple[str, ...]:
    """The settings of a function, with their defaults, or the names of a class's."""
    if isinstance(part, type) and dataclasses.is_dataclass(part):
        return tuple(field.name for field in dataclasses.fields(part))
    function = part.function if isinstance(part, Rule) else part
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not callable, or a builtin without a signature
        return ()
    return tuple(
        one.name if one.default is one.empty else f"{one.name} = {one.default!r}"
        for one in parameters
        if one.kind is one.KEYWORD_ONLY
    )
