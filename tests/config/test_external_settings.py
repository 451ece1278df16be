"""[external.NAME]: which models go elsewhere, and what is refused before anything starts."""

from typing import Any

import pytest

from agentlightning.config.external import ExternalModelConfig, find_external
from agentlightning.config.file import load_config
from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError

LEAST: dict[str, Any] = {"model": {"path": "org/m"}, "agent": {"run": "agent.py:solve"}, "data": {"train": "t.jsonl"}}
JUDGE: dict[str, Any] = {"url": "https://api.openai.com/v1", "models": ["gpt-5*"], "key_env": "OPENAI_API_KEY"}


def problem(**models: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({**LEAST, "external": models})
    return str(caught.value)


def test_an_upstream_needs_an_address_and_models() -> None:
    config = parse_config({**LEAST, "external": {"judge": JUDGE}})
    judge = config.external["judge"]
    assert (judge.protocol, judge.timeout_s, judge.max_retries, judge.rename) == ("openai", 600.0, 2, None)
    assert "judge.url: is required" in problem(judge={"models": ["x"]})
    assert "judge.models: is required" in problem(judge={"url": JUDGE["url"]})
    assert "judge.models" in problem(judge={**JUDGE, "models": []})


def test_settings_of_an_upstream_can_be_overridden_by_name() -> None:
    tables = {f"{table}.{name}": value for table, row in LEAST.items() for name, value in row.items()}
    overrides = ["external.judge.url=https://h/v1", 'external.judge.models=["x"]', "external.judge.max_retries=0"]
    judge = load_config(None, overrides, tables).external["judge"]
    assert (judge.url, judge.models, judge.max_retries) == ("https://h/v1", ("x",), 0)


def test_a_slip_in_the_name_of_a_setting_is_told() -> None:
    assert "external.judge.key: no such setting; did you mean 'key_env'?" in problem(judge={**JUDGE, "key": "x"})


@pytest.mark.parametrize("pasted", ["sk-proj-abcdefgh", "AIzaSyabcdefgh", "two words"])
def test_a_key_that_was_pasted_is_refused_and_not_repeated(pasted: str) -> None:
    sentence = problem(judge={**JUDGE, "key_env": pasted})
    assert "expected the name of an environment variable" in sentence
    assert pasted not in sentence


def test_our_own_variables_are_sent_nowhere() -> None:
    assert "is not sent anywhere" in problem(judge={**JUDGE, "key_env": "AGL_SERVER_KEY"})


@pytest.mark.parametrize(
    "url", ["", "api.openai.com/v1", "file:///etc", "https://", "https://u:p@h/v1", "https://h/v1?key=x", "http://h:x/"]
)
def test_an_address_is_a_plain_http_url(url: str) -> None:
    assert "url: expected http(s)://HOST/PATH without user, query or fragment" in problem(judge={**JUDGE, "url": url})


def test_an_anthropic_address_has_its_version() -> None:
    claude = {"protocol": "anthropic", "models": ["claude-*"]}
    assert "with its /v1" in problem(user={**claude, "url": "https://api.anthropic.com"})
    parse_config({**LEAST, "external": {"user": {**claude, "url": "https://api.anthropic.com/v1/"}}})


@pytest.mark.parametrize("pattern", ["m", "*", "?"])
def test_the_trained_model_cannot_be_hidden(pattern: str) -> None:
    assert f"{pattern!r} would take the calls of the policy 'm'" in problem(judge={**JUDGE, "models": [pattern]})


def test_an_upstream_is_not_called_like_the_policy() -> None:
    assert "is the name of the policy" in problem(default=JUDGE)


@pytest.mark.parametrize("name", ["gpt-5", "gpt-5*"])
def test_two_external_models_of_one_name_are_refused(name: str) -> None:
    sentence = problem(one={**JUDGE, "models": [name]}, other={**JUDGE, "models": [name]})
    assert f"external.other.models: {name!r} is a name of external.one, too" in sentence


@pytest.mark.parametrize(
    ("a", "b"), [("gpt-5*", "gpt-*"), ("gpt-5*", "gpt-5x"), ("gpt-5*", "gpt-?5"), ("gpt-5?", "gpt-5")]
)
def test_two_upstreams_that_can_be_told_apart_are_fine(a: str, b: str) -> None:
    parse_config({**LEAST, "external": {"one": {**JUDGE, "models": [a]}, "other": {**JUDGE, "models": [b]}}})


def test_a_model_name_belongs_to_its_exact_entry_before_a_pattern_and_to_the_longest_pattern() -> None:
    urls = {"all": ("*",), "large": ("gpt-5*",), "one": ("gpt-5-mini",)}
    models = {name: ExternalModelConfig(url="http://x/v1", models=patterns) for name, patterns in urls.items()}

    found = [find_external(models, name) for name in ("gpt-5-mini", "gpt-5", "other")]

    assert found == [models["one"], models["large"], models["all"]]
    assert find_external({"one": models["one"]}, "other") is None
