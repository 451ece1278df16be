"""[external.NAME]: which models go elsewhere, and what is refused before anything starts."""

from typing import Any

import pytest

from agentlightning.config.file import load_config
from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError

LEAST: dict[str, Any] = {"model": {"path": "org/m"}, "agent": {"run": "agent.py:solve"}, "data": {"train": "t.jsonl"}}
JUDGE: dict[str, Any] = {"url": "https://api.openai.com/v1", "models": ["gpt-5*"], "key_env": "OPENAI_API_KEY"}


def problem(**models: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({**LEAST, "external": models})
    return str(caught.value)


def test_settings_of_an_upstream_can_be_overridden_by_name() -> None:
    tables = {f"{table}.{name}": value for table, row in LEAST.items() for name, value in row.items()}
    overrides = ["external.judge.url=https://h/v1", 'external.judge.models=["x"]', "external.judge.max_retries=0"]
    judge = load_config(None, overrides, tables).external["judge"]
    assert (judge.url, judge.models, judge.max_retries) == ("https://h/v1", ("x",), 0)
    assert (judge.protocol, judge.timeout_s, judge.rename) == ("openai", 600.0, None)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"url": None}, "judge.url: is required"),
        ({"models": None}, "judge.models: is required"),
        ({"models": []}, "judge.models"),
        ({"key": "x"}, "external.judge.key: no such setting; did you mean 'key_env'?"),
        ({"key_env": "AGL_SERVER_KEY"}, "is not sent anywhere"),
        ({"protocol": "anthropic", "url": "https://api.anthropic.com"}, "with its /v1"),
        *(
            ({"url": url}, "url: expected http(s)://HOST/PATH without user, query or fragment")
            for url in ("api.openai.com/v1", "file:///etc", "https://", "https://u:p@h/v1", "https://h/v1?key=x")
        ),
        *(({"models": [name]}, f"{name!r} would take the calls of the policy 'm'") for name in ("m", "*", "?")),
    ],
)
def test_a_table_of_an_upstream_that_cannot_work_is_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    table = {name: value for name, value in (JUDGE | changed).items() if value is not None}
    assert sentence in problem(judge=table)


@pytest.mark.parametrize("pasted", ["sk-proj-abcdefgh", "AIzaSyabcdefgh", "two words"])
def test_a_key_that_was_pasted_is_refused_and_not_repeated(pasted: str) -> None:
    sentence = problem(judge={**JUDGE, "key_env": pasted})
    assert "expected the name of an environment variable" in sentence
    assert pasted not in sentence


def test_names_that_mean_two_models_are_refused() -> None:
    assert "is the name of the policy" in problem(default=JUDGE)
    for name in ("gpt-5", "gpt-5*"):
        sentence = problem(one={**JUDGE, "models": [name]}, other={**JUDGE, "models": [name]})
        assert f"external.other.models: {name!r} is a name of external.one, too" in sentence


@pytest.mark.parametrize(
    ("a", "b"), [("gpt-5*", "gpt-*"), ("gpt-5*", "gpt-5x"), ("gpt-5*", "gpt-?5"), ("gpt-5?", "gpt-5")]
)
def test_two_upstreams_that_can_be_told_apart_are_fine(a: str, b: str) -> None:
    parse_config({**LEAST, "external": {"one": {**JUDGE, "models": [a]}, "other": {**JUDGE, "models": [b]}}})
