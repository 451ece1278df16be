"""Rules for Prometheus and the dashboard: over the numbers that a server really exports, with labels that it gives them."""

from __future__ import annotations

import re

import pytest
import yaml
from gateway_house import House
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.analysis.server_alerts import SERVER_ALERTS, ServerAlert, grafana_dashboard, prometheus_rules
from agentlightning.records import NewRollout


async def scraped(house: House) -> dict[str, set[str]]:
    """Labels by name of sample, after a call."""
    claim = await house.claim()
    house.say("done")
    await house.openai(claim).chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    await house.store.enqueue([NewRollout(run_id=house.run_id, group_id="waits", replica=0, task={})])
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(await house.metrics()):
        if not family.samples:  # forks: none was counted yet
            found[f"{family.name}_total"] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("alert", SERVER_ALERTS, ids=lambda alert: alert.name)
async def test_a_rule_reads_what_a_server_exports(house: House, alert: ServerAlert) -> None:
    exported = await scraped(house)

    names = set(re.findall(r"agl_\w+", alert.expression))
    labels = set(re.findall(r"[{,](\w+)=", alert.expression)) | set(
        re.findall(r"on \(instance, (\w+)\)", alert.expression)
    )

    assert names <= set(exported)
    for name in names:
        assert labels <= exported[name] or "result" in labels


def test_the_rules_file_is_one_of_prometheus() -> None:
    (group,) = yaml.safe_load(prometheus_rules())["groups"]

    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in SERVER_ALERTS]
    assert [rule["expr"] for rule in group["rules"]] == [alert.expression for alert in SERVER_ALERTS]
    assert all(re.fullmatch(r"\d+m", rule["for"]) and rule["annotations"]["summary"] for rule in group["rules"])


def test_the_dashboard_draws_the_value_of_every_rule_with_its_bound() -> None:
    panels = grafana_dashboard()["panels"]

    assert [(panel["title"], panel["targets"][0]["expr"]) for panel in panels] == [
        (alert.name, alert.value) for alert in SERVER_ALERTS
    ]
    for panel, alert in zip(panels, SERVER_ALERTS, strict=True):
        steps = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert steps[0] is None
        assert steps[1] == float(alert.bound.split()[1]) + (alert.bound.startswith("=="))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
