"""How failures are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import InfrastructureError, VerifierError, boundary
from agentlightning.runner.failure import MAX_CHARACTERS, bounded, describe, origin, proxy_diagnosis

URL = "http://127.0.0.1:8765"


def raised(function: object) -> BaseException:
    try:
        function()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@given(st.text(max_size=3 * MAX_CHARACTERS))
def test_a_text_is_bounded_and_keeps_its_beginning_and_end(text: str) -> None:
    short = bounded(text)
    assert len(short) <= MAX_CHARACTERS
    assert short[:1000] == text[:1000]
    assert short[-1000:] == text[-1000:]


def test_the_frames_of_libraries_are_left_out_but_for_the_last() -> None:
    import json

    text = describe(raised(lambda: json.loads("{")))
    assert "test_failure.py" in text
    assert "json/__init__.py" not in text
    assert "json/decoder.py" in text
    assert "JSONDecodeError" in text


def test_the_cause_behind_a_typed_failure_is_told_too() -> None:
    def score() -> None:
        with boundary("the reward function"):
            {}["missing"]

    text = describe(raised(score))
    assert "the reward function failed: KeyError: 'missing'" in text
    assert text.count("KeyError: 'missing'") == 2


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://p:1"}, "HTTP_PROXY"),
        ({"http_proxy": "http://p:1", "no_proxy": "example.com"}, "http_proxy"),
        ({"HTTPS_PROXY": "http://p:1"}, None),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "127.0.0.1:8765"}, None),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "*"}, None),
    ],
)
def test_a_proxy_variable_that_diverts_calls_is_named(environment: dict[str, str], named: str | None) -> None:
    domain = {"HTTPS_PROXY": "http://p:1", "NO_PROXY": ".corp.example"}
    assert proxy_diagnosis("https://agl.corp.example", domain) is None
    assert proxy_diagnosis("https://other.example", domain) is not None
    diagnosis = proxy_diagnosis(URL, environment)
    assert (diagnosis is None) if named is None else (diagnosis or "").startswith(f"{named} is set")


def test_what_broke_beside_the_agent_is_found_in_what_frameworks_make_of_it() -> None:
    broken, judge = InfrastructureError("the sandbox is gone"), VerifierError("the scorer raised")
    plain = ValueError("mine")

    def chained() -> None:
        try:
            raise broken
        except InfrastructureError as error:
            raise RuntimeError("a tool failed") from error

    def while_handling() -> None:
        try:
            raise judge
        except VerifierError:
            raise RuntimeError("a tool failed")  # noqa: B904

    def suppressed() -> None:
        try:
            raise broken
        except InfrastructureError:
            raise plain from None

    assert origin(raised(chained)) is broken
    assert origin(raised(while_handling)) is judge
    assert origin(ExceptionGroup("tasks", [ExceptionGroup("inner", [plain, broken])])) is broken
    assert origin(raised(suppressed)) is plain
