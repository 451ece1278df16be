"""Instrumentations of the ecosystem are found by name, and an absent one is named with its package."""

from __future__ import annotations

import pytest

from agentlightning.errors import ConfigError
from agentlightning.tracing.frameworks import find_instrumentations


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("langchain", "openinference.instrumentation.langchain"),
        ("openai_agents", "openinference.instrumentation.openai_agents"),
        ("openai-agents", "openinference.instrumentation.openai_agents"),
        ("autogen_agentchat", "openinference.instrumentation.autogen_agentchat"),
        ("httpx", "opentelemetry.instrumentation.httpx"),
        ("opentelemetry-instrumentation-langchain", "opentelemetry.instrumentation.langchain"),
        ("openinference-instrumentation-langchain", "openinference.instrumentation.langchain"),
    ],
)
def test_an_instrumentation_is_found_by_its_name_or_by_its_package(name: str, module: str) -> None:
    [entry] = find_instrumentations([name])
    assert entry.module == module


def test_an_absent_one_is_named_with_the_package_to_install() -> None:
    with pytest.raises(ConfigError) as error:
        find_instrumentations(["langchain", "crewai"])
    assert "'crewai'" in str(error.value)
    assert "pip install openinference-instrumentation-crewai" in str(error.value)
    assert "langchain" in str(error.value).rpartition("installed are")[2]
