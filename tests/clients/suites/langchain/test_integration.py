"""LangChain's standard integration tests against the gateway."""

from __future__ import annotations

from langchain_tests.integration_tests import ChatModelIntegrationTests
from models import AnthropicModel, OpenAIModel, Responses, ResponsesV1


class TestChat(OpenAIModel, ChatModelIntegrationTests):
    pass


class TestResponses(Responses, ChatModelIntegrationTests):
    pass


class TestResponsesV1(ResponsesV1, ChatModelIntegrationTests):
    pass


class TestAnthropic(AnthropicModel, ChatModelIntegrationTests):
    pass
