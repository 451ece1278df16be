"""What the standard tests of LangChain are told about each chat model."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI

MODEL = os.environ["AGL_MODEL"]


class OpenAIModel:
    """What tests of ChatOpenAI share; address and key come from the environment."""

    has_tool_choice = True
    supports_json_mode = True
    supports_model_override = True
    model_override_value = MODEL

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "stream_usage": True}


class Responses(OpenAIModel):
    """ChatOpenAI over the Responses API."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "use_responses_api": True}


class ResponsesV1(Responses):
    """The same, with messages in LangChain's newer format."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "output_version": "responses/v1"}


class AnthropicModel(OpenAIModel):
    """ChatAnthropic; JSON mode is OpenAI's."""

    supports_json_mode = False
    supports_anthropic_inputs = True

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL}
