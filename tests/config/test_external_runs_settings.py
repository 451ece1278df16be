"""model.path = "external:NAME": what has no effect on it, or would be missing, is told before anything starts."""

from typing import Any

import pytest

from agentlightning.config.run import Config, parse_config
from agentlightning.errors import ConfigError
from agentlightning.trainer.policies import policy_configs

HOSTED: dict[str, Any] = {"url": "https://api.openai.com/v1", "models": ["gpt-*", "gpt-5-mini"]}


def config(**tables: Any) -> Config:
    known = {"agent": {"run": "agent.py:solve"}, "data": {"train": "t.jsonl"}, "external": {"hosted": HOSTED}}
    return parse_config({"model": {"path": "external:hosted"}} | known | tables)


def test_agents_ask_for_the_first_name_that_is_no_pattern() -> None:
    assert config().agent_model == "gpt-5-mini"
    assert policy_configs(config()) == {}
    assert config(model={"path": "org/m"}).agent_model is None
    assert config(external={"hosted": {**HOSTED, "models": ["m", "*"]}}).agent_model == "m"


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        (
            {"model": {"path": "external:other"}},
            r"model\.path: there is no table \[external\.other\]; expected one of hos",
        ),
        (
            {"external": {"hosted": {**HOSTED, "models": ["gpt-*"]}}},
            r"external\.hosted\.models: expected a name without",
        ),
        (
            {"model": {"path": "external:hosted", "temperature": 0.5}},
            r"temperature: has no effect on an external model",
        ),
        ({"model": {"path": "external:hosted", "max_tokens": 5}}, r"max_tokens: has no effect on an external model"),
        ({"engine": {"device": "cpu"}}, r"engine: has no effect with model\.path = 'external:hosted'"),
        (
            {"agent": {"run": "a.py:f", "unsupported_params": "drop"}},
            r"agent\.unsupported_params: has no effect with model\.path",
        ),
        ({"policies": {"a": {}}}, r"policies: has no effect with model\.path"),
        ({"policies": {"a": {"model": "external:hosted"}}, "model": {}}, r"policies(\.a\.model)?: .*external:hosted"),
    ],
)
def test_a_setting_without_effect_on_an_external_model_is_an_error(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(**tables)
