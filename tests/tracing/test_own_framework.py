"""A framework of the user's own: the page's program names the agents of its calls, and its spans mean what they should."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls_noted import serve
from opentelemetry.sdk.trace import TracerProvider

import agentlightning as agl
from agentlightning.adapters.semantics import agent_of, json_of, role_of
from agentlightning.errors import ConfigError
from agentlightning.records import JSON, Span
from agentlightning.runner.agent import LLM
from agentlightning.traces.episodes import chat_messages
from agentlightning.tracing.buffer import SpanBuffer
from agentlightning.tracing.frameworks import current_agent, load_installed_adapters
from agentlightning.tracing.propagation import ContextPropagator
from agentlightning.tracing.tracer import Tracer

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


def chat_of(span: Span, side: str) -> list[JSON] | None:
    return chat_messages(json_of(span.attributes, f"gen_ai.{side}.messages"))


@pytest.fixture
def program(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The names of the page's agent.py, run beside its relay.py."""
    files = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(tmp_path))
    names: dict[str, Any] = {"__name__": "agent"}
    exec(compile(files["agent.py"], "agent.py", "exec"), names)
    yield names
    sys.path.remove(str(tmp_path))
    del sys.modules["relay"]


async def test_the_program_of_the_page_names_the_agents_of_its_calls(program: dict[str, Any]) -> None:
    async with serve() as noted:
        context = ContextPropagator(noted.url)
        context.install()
        try:
            llm = LLM(base_url=f"{noted.url}/v1", anthropic_base_url=noted.url, api_key="k", model="m")
            assert await program["solve"]({"question": "1 + 1?", "answer": "two"}, llm) == 1.0
        finally:
            context.remove()
    assert noted.agents == ["writer", "editor"]


def test_spans_of_the_page_are_recorded_by_the_conventions(program: dict[str, Any]) -> None:
    buffer = SpanBuffer("run", "r", 1)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Tracer(lambda: buffer))
    turn = {"relay.role": "writer", "relay.heard": '["hi"]', "relay.said": "ho"}
    provider.get_tracer("relay").start_span("relay.turn", attributes=turn).end()
    provider.get_tracer("other").start_span("step").end()
    spoken, other = buffer.take()
    assert (role_of(spoken), agent_of(spoken)) == ("agent", "writer")
    assert (chat_of(spoken, "input"), chat_of(spoken, "output")) == (
        [{"role": "user", "content": "hi"}],
        [{"role": "assistant", "content": "ho"}],
    )
    assert not any(name.startswith("gen_ai.") for name in other.attributes)


def test_an_adapter_must_name_its_module() -> None:
    with pytest.raises(ConfigError, match=r"Nameless\.module: expected the name"):

        class Nameless(agl.FrameworkAdapter):
            pass


def announced(folder: Path, value: str) -> None:
    """A package in this folder that announces `value` as an adapter."""
    info = folder / "relay_adapter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: relay-adapter\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[agentlightning.frameworks]\nrelay = {value}\n", encoding="utf-8")
    sys.path.insert(0, str(folder))


def test_an_installed_package_announces_its_adapter(tmp_path: Path) -> None:
    (tmp_path / "announced_relay.py").write_text(
        "import agentlightning as agl\nclass Relay(agl.FrameworkAdapter):\n    module = __name__\n"
        "    def current_agent(self, module):\n        return 'runner'\n",
        encoding="utf-8",
    )
    announced(tmp_path, "announced_relay:Relay")
    try:
        load_installed_adapters()
        assert current_agent() == "runner"
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("announced_relay", None)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [("os:getcwd", "expected a subclass of FrameworkAdapter"), ("no_such_module:X", "failed: ModuleNotFoundError")],
)
def test_an_entry_point_that_is_no_adapter_is_named(tmp_path: Path, value: str, sentence: str) -> None:
    announced(tmp_path, value)
    try:
        with pytest.raises(ConfigError, match=f"framework adapter 'relay'.*{sentence}"):
            load_installed_adapters()
    finally:
        sys.path.remove(str(tmp_path))
