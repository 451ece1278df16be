"""[prompts]: what cannot work is refused before anything starts, and what is configured becomes resources of the run."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.config.run import Config, parse_config
from agentlightning.errors import ConfigError
from agentlightning.prompts.templates import Template
from agentlightning.records import Resource
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.processes import put_gateway_settings

LEAST: dict[str, Any] = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
SYSTEM = {"system": "Answer {question}."}
FEW = {"few": {"messages": [{"role": "user", "content": "{q}"}]}}


def config(**prompts: Any) -> Config:
    return parse_config({**LEAST, "prompts": prompts})


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ({"templates": {"a b": "x"}}, "prompts: templates.a b: expected a name of letters, digits"),
        ({"templates": {"default": "x"}}, r"prompts\.templates\.default: is the name of another resource of the run"),
        (
            {"templates": {"s": "{a.b}"}},
            r"prompts\.templates\.s: template: expected a name between braces, got \{a\.b\}",
        ),
        (
            {"templates": {"s": {"text": "{{ a", "format": "jinja"}}},
            r"prompts\.templates\.s: template: line 1: unexpected end of template",
        ),
        ({"templates": {"s": {}}}, r"prompts\.templates\.s: give either text or messages"),
        (
            {"templates": SYSTEM, "rules": [{"template": "sytem", "agents": ["*"]}]},
            r"rules\.0\.template: there is no template 'sytem'; known are system",
        ),
        (
            {"templates": SYSTEM, "rules": [{"template": "system"}]},
            r"prompts\.rules\.0: agents: expected names of agents, or \"\*\" for all, got none",
        ),
        (
            {"templates": FEW, "rules": [{"template": "few", "agents": ["*"]}]},
            r"rules\.0\.template: expected one that is a text, and 'few' is messages",
        ),
    ],
)
def test_prompts_that_cannot_work_are_refused_with_the_setting(prompts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        config(**prompts)
    assert len(str(refused.value).splitlines()) == 1


def test_placeholders_are_checked_against_the_fields_of_tasks_before_anything_runs() -> None:
    ruled = config(templates=SYSTEM, rules=[{"template": "system", "agents": ["*"]}]).prompts
    ruled.check_fields(["question", "schema"], False)
    sentence = "prompts.templates.system: unknown placeholder 'question'; the tasks have the fields a, b"
    with pytest.raises(ConfigError, match=sentence):
        ruled.check_fields(["b", "a"], False)
    asked = config(templates=SYSTEM).prompts  # an agent that asks may give the field itself
    asked.check_fields(["a"], False)
    with pytest.raises(ConfigError, match="unknown placeholder 'question'"):
        asked.check_fields(["a"], True)


async def test_configured_templates_become_resources_and_a_resumed_run_keeps_later_versions() -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("r", {})).id
        for _ in range(2):
            await put_gateway_settings(config(templates={**SYSTEM, **FEW}), run_id, store)
        assert [(one.name, one.version) for one in await store.resources(run_id)] == [("few", 1), ("system", 1)]
        [system] = await store.resources(run_id, "system")
        assert system.value["placeholders"] == ["question"]
        later = Template.of("Think: {question}", source="me").value()
        await store.put_resources([Resource(run_id=run_id, name="system", kind="prompt_template", value=later)])
        await put_gateway_settings(config(templates=SYSTEM), run_id, store)
        assert [one.version for one in await store.resources(run_id, "system")] == [2]
        await put_gateway_settings(config(templates={"system": "Edited {question}"}), run_id, store)
        [newest] = await store.resources(run_id, "system")
        assert (newest.version, newest.parent, newest.value["template"]) == (3, 2, "Edited {question}")
