"""The page about AIR has every rule with its budget and sign, and every setting with its default."""

from __future__ import annotations

from pathlib import Path

from test_docs import defaults, documented_default, rows

from agentlightning.config.agent import AirConfig, AirRuleConfig
from agentlightning.tracing.air import BUILT_IN

TEXT = (Path(__file__).parents[2] / "docs" / "air.md").read_text(encoding="utf-8")


def table(header: str) -> list[list[str]]:
    """Rows of the table whose header begins so."""
    return list(rows(TEXT.split(f"\n{header}")[1].split("\n\n")[0]))


def test_the_page_has_every_rule_with_its_budget_and_its_sign() -> None:
    documented = {cells[0].strip("`"): (bool(cells[2]), cells[3]) for cells in table("| rule | scores |")}
    signs = {True: "below 0", False: "above 0"}
    assert documented == {name: (rule.budget is not None, signs[rule.penalty]) for name, rule in BUILT_IN.items()}


def test_the_page_has_every_setting_with_its_default() -> None:
    for header, config in (("| setting of a rule |", AirRuleConfig), ("| setting of `[air]` |", AirConfig)):
        documented = {cells[0].strip("`"): documented_default(cells[1]) for cells in table(header)}
        assert documented == defaults(config)
