"""A scripted model that does what its prompt asks: it calls tools that it is offered, fills schemas and reports results.

Driven by the scripted engine, for suites that others wrote: their assertions hold for any capable model. It reads the
prompt as rendered by the template of the SDK tests and knows no suite by name. Pure.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

JSON = dict[str, Any]

MARK = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|\Z)", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
STRING, NUMERIC, WHOLE = "string", "number", "integer"
NAMED = re.compile(r'\\"name\\": \\"(.+?)\\"')
"""A literal of a grammar: the head of a call of a tool."""

SCHEMA = re.compile(r"%json (\{.*\})$", re.MULTILINE)
QUOTED = re.compile(r"[`'](\w+)[`']")
"""A key of the JSON that a question asks for without a schema."""

DEEPEST = 8
"""Levels of a recursive schema that are filled."""


@dataclass(frozen=True)
class Prompt:
    """The turns of one rendered prompt, and the tools in its head."""

    turns: list[tuple[str, str]]
    tools: list[JSON]
    """Functions with name and parameters."""

    @property
    def question(self) -> str:
        """The last text of the user."""
        return next((text for role, text in reversed(self.turns) if role == "user"), "")


def complete(rendered: str, grammar: str | None = None) -> str:
    """The completion of a rendered prompt: a call or a text, and what the grammar demands where the engine was given one."""
    prompt = read_prompt(rendered)
    results = trailing_results(prompt)
    names = NAMED.findall(grammar or "")
    schema = None if grammar is None else content_schema(grammar)
    if schema is not None and (results or not names):
        return json.dumps(instance(schema, prompt.question), ensure_ascii=False)
    if results and not forces_call(grammar):
        return f"The result is: {' '.join(results)}"
    tools = [tool for tool in prompt.tools if not names or tool["name"] in names]
    if tools:
        return "\n".join(call_of(tool, prompt.question) for tool in chosen(prompt, tools))
    return f"Hello! You said: {prompt.question}"


def content_schema(grammar: str) -> JSON | None:
    """The JSON schema of the content in a grammar as the gateway writes it; schemas of arguments are lenient."""
    found = [json.loads(each) for each in SCHEMA.findall(grammar)]
    return next((each for each in found if not each.get("x-guidance", {}).get("lenient")), None)


def forces_call(grammar: str | None) -> bool:
    """True where the grammar has calls of tools, and no text beside them."""
    return grammar is not None and bool(NAMED.search(grammar)) and "TEXT" not in grammar


def read_prompt(rendered: str) -> Prompt:
    """Takes a rendered prompt apart; the opened turn of the assistant is left out."""
    turns = MARK.findall(rendered)
    if turns and turns[-1] == ("assistant", ""):
        turns = turns[:-1]
    tools = []
    for role, text in turns[:1]:
        if role == "system" and text.startswith("# Tools\n"):
            tools = [parsed for line in text.splitlines() if (parsed := _json(line)) is not None]
    return Prompt(turns, [tool.get("function", tool) for tool in tools])


def trailing_results(prompt: Prompt) -> list[str]:
    """Results of tools that came after everything else was said."""
    results: list[str] = []
    for role, text in reversed(prompt.turns):
        if role != "tool":
            break
        results.insert(0, text)
    return results


def chosen(prompt: Prompt, tools: list[JSON]) -> list[JSON]:
    """The tools whose names or words the question has, else the first."""
    words = set(re.findall(r"\w+", prompt.question.lower()))
    named = [tool for tool in tools if tool["name"].lower() in words]
    akin = [tool for tool in tools if set(tool["name"].lower().split("_")) & words]
    return (named or akin or tools)[:1]


def call_of(tool: JSON, question: str) -> str:
    """A call of the tool in the words of the template."""
    arguments = instance(tool.get("parameters") or {"type": "object"}, question)
    return (
        "<tool_call>\n"
        + json.dumps({"name": tool["name"], "arguments": arguments}, ensure_ascii=False)
        + "\n</tool_call>"
    )


def instance(schema: JSON, question: str) -> Any:
    """An instance of a JSON schema, filled from what the question says."""
    return _Filler(schema, question).fill(schema, "", 0)


class _Filler:
    """Fills one schema; numbers of the question are given out in their order."""

    def __init__(self, root: JSON, question: str) -> None:
        self._root = root
        self._question = question
        self._numbers = NUMBER.findall(question)

    def fill(self, schema: JSON, name: str, depth: int) -> Any:
        if "$ref" in schema:
            return self.fill(self._resolve(schema["$ref"]), name, depth + 1)
        for fixed in ("const", "default"):
            if fixed in schema and (fixed == "const" or schema[fixed] is not None):
                return schema[fixed]
        if schema.get("enum"):
            return schema["enum"][0]
        for several in ("anyOf", "oneOf", "allOf"):
            if schema.get(several):
                options = [each for each in schema[several] if each.get("type") != "null"] or schema[several]
                return self.fill(options[0], name, depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else STRING)
        kind = next(each for each in kind if each != "null") if isinstance(kind, list) else kind
        return self._of_kind(kind, schema, name, depth)

    def _of_kind(self, kind: str, schema: JSON, name: str, depth: int) -> Any:
        if kind == "object":
            properties = schema.get("properties") or {key: {} for key in QUOTED.findall(self._question) if not depth}
            required = properties if depth < DEEPEST else schema.get("required", [])
            return {key: self.fill(properties.get(key, {}), key, depth + 1) for key in required}
        if kind == "array":
            least = max(schema.get("minItems", 0), int(depth < DEEPEST))
            return [self.fill(schema.get("items", {}), name, depth + 1) for _ in range(least)]
        if kind in (WHOLE, NUMERIC):
            found = self._numbers.pop(0) if self._numbers else "3"
            value = float(found) if kind == NUMERIC else int(float(found))
            return min(max(value, schema.get("minimum", value)), schema.get("maximum", value))
        return {"boolean": True, "null": None}.get(kind, self._question or name)

    def _resolve(self, reference: str) -> JSON:
        found: Any = self._root
        for key in reference.removeprefix("#/").split("/"):
            found = found[key]
        return dict(found)


def _json(line: str) -> JSON | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
