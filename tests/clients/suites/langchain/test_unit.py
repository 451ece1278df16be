"""LangChain's standard unit tests, with the address and key of the gateway in the environment."""

from __future__ import annotations

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests
from models import AnthropicModel, OpenAIModel, Responses, ResponsesV1


class Unit(ChatModelUnitTests):
    """Serialised models hold the address, which is another in every run."""

    __test__ = False

    @pytest.fixture(autouse=True)
    def _address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
        monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:1")


class TestChat(OpenAIModel, Unit):
    __test__ = True


class TestResponses(Responses, Unit):
    __test__ = True


class TestResponsesV1(ResponsesV1, Unit):
    __test__ = True


class TestAnthropic(AnthropicModel, Unit):
    __test__ = True
