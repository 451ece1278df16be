"""Grammar: what a completion must look like, as one text that engines decode under and learners rebuild masks from.

Driven by the gateway, which gives it what the request says (protocols/fields.py), the model's syntax of tool calls and the
end of the prompt. The result is a spec, plain JSON that is recorded on the call:

    {"kind": "json_schema", "lark": "start: …", "library": "llguidance", "version": "1.9.1"}

Engines read `lark` alone, in the dialect of llguidance, which vLLM reads too (`structured_outputs.grammar`). White space in
JSON is settled (", " and ": "): left open, a policy would learn blanks. A template's thinking may come before what is
constrained. Pure; knows no request's wire format and no engine.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import contextlib
import json
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from agentlightning.errors import AgentLightningError, EngineError, InputError, MissingExtraError
from agentlightning.records import JSON
from agentlightning.rendering.completion_parser import CLOSE, OPEN, Syntax

LIBRARY = "llguidance"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

MAX_GRAMMAR = 256 * 1024
"""Bytes of a grammar's text: what compiles one takes seconds for some of megabytes."""

STYLE: JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space in JSON, as json.dumps and chat templates write it."""

FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
"""Formats of texts that the library makes a grammar of. To JSON Schema others are annotations, which bind nothing."""

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DATA = ("const", "enum", "default", "examples")
"""Keywords of JSON Schema whose values are schemas by name, and those whose values are no schemas."""

ANY_TEXT = "/(?s:.+)/"

ANY_BYTES = "~/[a&&b]/"
"""Also what is no UTF-8, which `.` leaves out: so nothing is left where a mark was written, and nothing is searched on."""


class GrammarError(InputError):
    """A request asks for a grammar that cannot be made; `field` names what asked for it."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateModel:
    """The facts about a model that a grammar of its completions needs."""

    syntax: Syntax | None
    """The way in which it writes tool calls; None: one for which no grammar can be made here."""
    thinks: bool = False
    special: Callable[[str], int | None] = lambda text: None
    """The id of the token that the grammar's library takes for a special one and that is written so; None where none is."""


def make_grammar(
    wanted: Mapping[str, Any],
    tools: list[JSON] | None,
    model: TemplateModel,
    *,
    prompt: str | None,
    one_call: bool = False,
) -> JSON:
    """The spec for what a request wants: `content`, `tool_call` or both (then the completion is either).

    `prompt` is the rendered one, by whose end one knows whether the model is thinking already; None where no thinking
    comes before: after a raw prompt, in which there is no tool call either, and after text that the agent began with.
    Raises GrammarError; `check_grammar` finds what the library refuses.
    """
    content, calls = wanted.get("content"), wanted.get("tool_call")
    writer = _Writer(model)
    kind = "tool_call" if calls else str(content["kind"]) if content else ""
    if not calls and content and content["kind"] == "lark":
        return _spec("lark", content["lark"], content["field"])
    if calls and model.syntax is None:
        raise GrammarError(calls["field"], "the model's way of writing tool calls is not known, so none can be forced")
    if content and content["kind"] == "lark":
        raise GrammarError(
            content["field"], "a grammar of one's own cannot be combined with tools that it does not know"
        )
    options = []
    if calls and (tools or ()):
        options.append(
            writer.calls(
                calls, tools or [], one_call or bool(calls.get("one")), text=not calls["required"] and not content
            )
        )
    if content and not (calls and calls["required"]):
        options.append(writer.content(content))
    elif calls and not calls["required"]:
        options.append(writer.rule("TEXT", writer.plain_text()))
    start = " | ".join(options)
    if prompt is not None and model.thinks:
        start = writer.after_thinking(start, prompt)
    field = (calls or content or {}).get("field", "")
    return _spec(kind, "\n".join([f"start: {start}", *writer.rules]), field)


def check_grammar(spec: JSON, field: str) -> None:
    """Raises GrammarError where the library cannot compile it, within its bounds. It may take a second."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise MissingExtraError("llguidance", "server") from error
    failed, said = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_lark(spec["lark"]), limits=parser_limits()
    )
    if failed:
        raise GrammarError(field, f"no grammar can be made of it: {_sentence(said[0])}")


def parser_limits() -> Any:
    """Bounds of the library (llguidance.LLParserLimits), the same wherever a grammar is compiled or followed: what is over
    them is refused, whatever the machine. Its own bounds let one compile for seconds, and its states grow to 500 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000, max_grammar_size=50_000, max_lexer_states=50_000, verbose_errors=False
    )


def structured_outputs(given: Mapping[str, Any]) -> JSON:
    """The spec for vLLM's `structured_outputs`: json, json_object, regex, choice or grammar. Raises GrammarError."""
    kinds: dict[str, Callable[[Any], JSON]] = {
        "json": lambda value: {"kind": "json_schema", "schema": json.loads(value) if isinstance(value, str) else value},
        "json_object": lambda value: {"kind": "json_object"},
        "regex": lambda value: {"kind": "regex", "pattern": value},
        "choice": lambda value: {"kind": "choice", "choices": value},
        "grammar": lambda value: {"kind": "lark", "lark": value},
    }
    found = [name for name in kinds if given.get(name) not in (None, False)]
    if len(found) != 1:
        raise GrammarError(
            "structured_outputs", f"expected one of {', '.join(kinds)}, got {', '.join(found) or 'none'}"
        )
    [name] = found
    content: JSON = {**kinds[name](given[name]), "field": f"structured_outputs.{name}"}
    return make_grammar({"content": content}, None, TemplateModel(syntax=None), prompt=None)


class _Writer:
    """Rules of one grammar."""

    def __init__(self, model: TemplateModel) -> None:
        self._model = model
        self.rules: list[str] = []

    def rule(self, name: str, body: str, options: str = "") -> str:
        """A new rule; returns its name, which is made unique."""
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def mark(self, text: str) -> str:
        """A mark of the template: a token of its own where the library knows it as a special one, else text."""
        index = self._model.special(text)
        return quoted(text) if index is None else f"<[{index}]>"

    def until(self, close: str) -> str:
        """Any text up to a mark, and the mark."""
        if self._model.special(close) is not None:
            return f"{self.rule('text', ANY_TEXT)}? {self.mark(close)}"
        return self.rule("text", f"/(?s:.*){_escaped(close)}/", "[lazy]")

    def schema(self, schema: JSON, *, lenient: bool = False) -> str:
        """JSON of a schema."""
        style = {**STYLE, "lenient": True} if lenient else STYLE
        text = json.dumps({**_known_formats(schema), "x-guidance": style}, ensure_ascii=False)
        return self.rule("json", f"%json {text}")

    # --- content ------------------------------------------------------------------------------------------------------

    def content(self, content: Mapping[str, Any]) -> str:
        kind = content["kind"]
        if kind == "json_schema":
            return self.schema(content["schema"])
        if kind == "json_object":
            return self.schema({"type": "object"})
        if kind == "regex":
            return self.rule("regex", f"/{_slashed(content['pattern'])}/")
        return self.rule("choice", " | ".join(map(quoted, content["choices"])))

    def plain_text(self) -> str:
        """Text in which no tool call can be read."""
        if self._model.syntax == "bare":
            return r"/\s*[^{\s](?s:.*)/"
        return f"{ANY_TEXT} & {_without(OPEN)}"

    def after_thinking(self, start: str, prompt: str) -> str:
        """The grammar after the template's thinking: one that has begun must end, one that is over does not come back."""
        end = prompt.rstrip()
        if end.endswith(THINK_CLOSE):
            return start
        newlines = self.rule("newlines", r"/\n+/")
        rest = f"{self.until(THINK_CLOSE)} {newlines}?"
        if end.endswith(THINK_OPEN):
            return f"{rest} ({start})"
        thinking = self.rule("thinking", f"{self.mark(THINK_OPEN)} {rest}")
        return f"{thinking}? ({start})"

    # --- tool calls ---------------------------------------------------------------------------------------------------

    def calls(self, wanted: Mapping[str, Any], tools: Sequence[JSON], one: bool, *, text: bool) -> str:
        """Calls of the tools that may be called: one, or any number of them; with `text`, text may come before."""
        names = wanted["names"]
        functions = [tool["function"] for tool in tools if names is None or tool["function"]["name"] in names]
        if not functions:
            raise GrammarError(wanted["field"], "none of the tools has a name that may be called")
        syntax = self._model.syntax
        write = {"hermes": self._json_call, "bare": self._json_call, "tags": self._tag_call, "pairs": self._pair_call}
        assert syntax is not None
        bodies = self.rule("call", " | ".join(write[syntax](function) for function in functions))
        if syntax == "bare":
            return bodies
        first = opened = self.mark(OPEN)
        if text and self._model.special(OPEN) is None:
            first = self.until(OPEN)
        elif text:
            first = f"{self.rule('BEFORE', self.plain_text())}? {opened}"
        close = self.mark(CLOSE)
        more = "" if one else f' ("\\n" {opened} {bodies} {close})*'
        return f"{first} {bodies} {close}{more}"

    def _json_call(self, function: JSON) -> str:
        bare = self._model.syntax == "bare"
        edge = "" if bare else "\n"
        name = json.dumps(function["name"], ensure_ascii=False)
        opening = quoted(f'{edge}{{"name": {name}, "arguments": ')
        if (
            bare
        ):  # cut as JSON is: a longer literal would take the beginning of an object that is the answer for its own
            opening = " ".join(map(quoted, ["{", '"name"', ": ", name, ", ", '"parameters"', ": "]))
        closing = quoted("}" + edge)
        return self.rule("function", f"{opening} {self.schema(*_parameters(function)[:1], lenient=True)} {closing}")

    def _tag_call(self, function: JSON) -> str:
        parts = [quoted(f"\n<function={function['name']}>\n")]
        for name, schema, required in _arguments(function):
            value = (
                f"{quoted(f'<parameter={name}>' + chr(10))} {self._value(schema, chr(10) + '</parameter>' + chr(10))}"
            )
            argument = self.rule("argument", value)
            parts.append(argument if required else f"{argument}?")
        return self.rule("function", " ".join([*parts, quoted("</function>\n")]))

    def _pair_call(self, function: JSON) -> str:
        parts = [quoted(f"{function['name']}\n")]
        for name, schema, required in _arguments(function):
            key = f"{self.mark('<arg_key>')} {quoted(name)} {self.mark('</arg_key>')} {quoted(chr(10))}"
            value = f"{self.mark('<arg_value>')} {self._value(schema, '</arg_value>')} {quoted(chr(10))}"
            argument = self.rule("argument", f"{key} {value}")
            parts.append(argument if required else f"{argument}?")
        return self.rule("function", " ".join(parts))

    def _value(self, schema: JSON, close: str) -> str:
        """The value of an argument with what closes it: texts are written as they are, all else as JSON. No text holds a
        mark that would end it, or the call, where it is read; nor a line break at its edge, which the reader takes off."""
        if schema.get("type") != "string":
            return f"{self.schema(schema, lenient=True)} {self.mark(close)}"
        edges = [] if close.startswith("\n") else [f'~("\\n" {ANY_BYTES})', f'~({ANY_BYTES} "\\n")']
        text = " & ".join(["/(?s:.*)/", *_text_parts(schema), _without(close.strip(), CLOSE), *edges])
        if self._model.special(close) is None:  # one expression: of two, the text would take the beginning of its close
            return self.rule("VALUE", f"({text}) {quoted(close)}")
        return f"{self.rule('VALUE', text)} {self.mark(close)}"


def quoted(text: str) -> str:
    """A text as the grammar's literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # a control character, which it refuses


def _known_formats(schema: Any, *, named: bool = False) -> Any:
    """The schema without formats that the library does not know; `named`: an object of schemas by name."""
    if isinstance(schema, list):
        return [_known_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if named:
        return {name: _known_formats(one) for name, one in schema.items()}
    return {
        key: value if key in DATA else _known_formats(value, named=key in NAMED)
        for key, value in schema.items()
        if key != "format" or value in FORMATS
    }


def _parameters(function: JSON) -> tuple[JSON, JSON]:
    """The schema of a function's arguments, an object's; and its properties."""
    schema = function.get("parameters")
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    return {"type": "object", **schema}, properties if isinstance(properties, dict) else {}


def _arguments(function: JSON) -> list[tuple[str, JSON, bool]]:
    """(name, schema, whether it must be given) of each argument, in order."""
    schema, properties = _parameters(function)
    required = schema.get("required")
    shared: JSON = {name: schema[name] for name in ["$defs", "definitions"] if name in schema}
    return [
        (name, {**shared, **(one if isinstance(one, dict) else {})}, isinstance(required, list) and name in required)
        for name, one in properties.items()
    ]


def _text_parts(schema: JSON) -> list[str]:
    """Expressions all of which a text matches by its schema. `format` gives none: to JSON Schema it is an annotation."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = [quoted(one) for one in choices if isinstance(one, str)] if isinstance(choices, list) else []
    parts = [f"({' | '.join(texts)})"] if texts else []
    if isinstance(pattern := schema.get("pattern"), str):
        parts.append(f"/{_slashed(_searched(pattern))}/")
    low, high = schema.get("minLength") or 0, schema.get("maxLength")
    if low or high is not None:
        parts.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
    every = schema.get("allOf")
    for one in every if isinstance(every, list) else ():
        parts += _text_parts(one) if isinstance(one, dict) else []
    return parts


def _spec(kind: str, lark: str, field: str) -> JSON:
    if len(lark.encode()) > MAX_GRAMMAR:
        raise GrammarError(field, f"its grammar has {len(lark.encode())} bytes; expected at most {MAX_GRAMMAR}")
    try:
        known = version(LIBRARY)
    except PackageNotFoundError as error:
        raise MissingExtraError("llguidance", "server") from error
    return {"kind": kind, "lark": lark, "library": LIBRARY, "version": known}


def _without(*marks: str) -> str:
    """Text that holds none of these."""
    return f"~({ANY_BYTES} ({' | '.join(map(quoted, marks))}) {ANY_BYTES})"


def _escaped(text: str) -> str:
    """A text as a part of a regular expression between slashes."""
    special = set("\\.+*?()|[]{}^$/#&-~")
    return "".join("\\n" if one == "\n" else f"\\{one}" if one in special else one for one in text)


def _slashed(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    result, escaped = "", False
    for one in pattern:
        result += "\\/" if one == "/" and not escaped else "\\n" if one == "\n" else one
        escaped = one == "\\" and not escaped
    return result


def _searched(pattern: str) -> str:
    """A regular expression of whole texts, for one that is looked for within them."""
    slashes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))
    ends = pattern.endswith("$") and slashes % 2 == 0
    inner = pattern.removeprefix("^")[: -1 if ends else None]
    return f"{'' if pattern.startswith('^') else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def _sentence(said: str) -> str:
    """The complaint of the library as one sentence, without the lines of the grammar, which are not the request's."""
    said = re.split(r"\n *\d+ \|", said)[0]
    if unknown := re.search(r"Unimplemented keys: \[(.*?)\]", said):
        return f"the keywords {unknown[1]} are not known; leave them out of the schema and check the answer instead"
    return " ".join(re.sub(r"^at .*? JSON schema: ", "", said).split())[:300]


# --- masks -----------------------------------------------------------------------------------------------------------


MAX_COMPILED = 64
"""Grammars that stay compiled, the newest ones."""

Mask = bytes
"""A bit for each token of the vocabulary, the lowest bit of a byte first; in whole words of 32 bits."""


class Grammars:
    """Compiled grammars for one tokenizer. Of `end_ids`, which end completions, the first ends one that is whole by its
    grammar: of several one would be drawn by chance. `vocab` is the model's number of tokens, where that may be above the
    tokenizer's."""

    def __init__(self, folder: Path, end_ids: Sequence[int], vocab: int = 0) -> None:
        self._folder = folder
        self.vocab = vocab
        self.end_ids = list(end_ids)
        self._loaded: Any = None
        self._compiled = LRUCache[str, Any](MAX_COMPILED)

    def matcher(self, lark: str) -> Any:
        """A matcher (llguidance.LLMatcher) at the grammar's start. InputError where it cannot be compiled."""
        found = self._compiled.get(lark)
        if found is None:
            tokenizer = self._tokenizer()
            from llguidance import LLMatcher

            found = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=parser_limits())
            if found.is_error():
                raise InputError(f"structured_outputs: the grammar does not compile: {found.get_error()[:300]}")
            self._compiled[lark] = found
        return found.deep_copy()

    def allowed(self, matcher: Any) -> Mask:
        """The tokens that may come next. EngineError where the grammar is past its bounds."""
        mask: Mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise EngineError(f"the grammar cannot be followed any further: {matcher.get_error()[:300]}")
        return mask

    def masks(self, spec: Mapping[str, Any], sampled: Sequence[int]) -> list[Mask]:
        """The mask before each of these tokens. EngineError where one of them was not allowed."""
        matcher = self.matcher(spec["lark"])
        found = []
        known: dict[Mask, Mask] = {}  # most places of a text have the same one, of a size that counts for long texts
        for place, token in enumerate(sampled):
            mask = self.allowed(matcher)
            mask = known.setdefault(mask, mask)
            if not mask[token >> 3] >> (token & 7) & 1:
                from llguidance import __version__ as installed

                raise EngineError(
                    f"token {place} of a call (id {token}) is none that its grammar allows: the grammar was made by "
                    f"{spec.get('library')} {spec.get('version')}, and its mask rebuilt by {installed}"
                )
            found.append(mask)
            if token not in self.end_ids:
                matcher.consume_token(token)
        return found

    def forced(self, spec: Mapping[str, Any], sampled: Sequence[int], logprobs: Sequence[float]) -> list[list[int]]:
        """[start, end) of the sampled tokens beside which the grammar allowed no other. Those have probability 1, so that
        masks are computed for tokens with logprob 0 alone."""
        matcher = self.matcher(spec["lark"])
        spans: list[list[int]] = []
        for place, (token, logprob) in enumerate(zip(sampled, logprobs, strict=True)):
            if logprob == 0.0 and int.from_bytes(self.allowed(matcher), "little").bit_count() == 1:
                if spans and spans[-1][1] == place:
                    spans[-1][1] += 1
                else:
                    spans.append([place, place + 1])
            if token in self.end_ids or not matcher.consume_token(token):
                break
        return spans

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            try:
                from llguidance import LLTokenizer
            except ModuleNotFoundError as error:
                raise MissingExtraError("llguidance", "server") from error
            file = self._folder / "tokenizer.json"
            if not file.is_file():
                raise InputError(
                    f"structured_outputs: the model {self._folder} has no tokenizer.json, which grammars need"
                )
            try:
                known = LLTokenizer(str(file), eos_token=self.end_ids[:1])
                if known.vocab_size < self.vocab:
                    known = LLTokenizer(str(file), n_vocab=self.vocab, eos_token=self.end_ids[:1])
            except ValueError as cause:  # one without a decoder, say
                raise InputError(
                    f"structured_outputs: not available with this model, whose tokenizer grammars cannot read: {cause}"
                ) from cause
            self._loaded = known
        return self._loaded


# --- checks in a process of their own -----------------------------------------------------------------------------------

MAX_CPU_S = 2.0
MAX_BYTES = 4 << 30
"""Of address space."""
STACK_BYTES = 2 << 20
STEPS = 3
"""Tokens after which a grammar is taken for one that can be followed."""
TOO_LONG = signal.SIGPROF


def main() -> None:
    """`python -m agentlightning.rendering.grammar`: a grammar's text as a line of JSON in, null or a sentence out.

    In a process of its own: a check that hangs, eats memory or overflows the stack ends nothing else. The stack is a
    fraction of that of the threads that compile the grammar later, so that what passes here passes there.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # a system without it, or a lower limit of its own
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    threading.stack_size(STACK_BYTES)
    for line in sys.stdin.buffer:
        said: list[str | None] = []
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        thread = threading.Thread(target=lambda lark=json.loads(line), to=said: to.append(refusal(lark)))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps(said[0]) + "\n")
        sys.stdout.flush()


def refusal(lark: str) -> str | None:
    """The reason why no completion can be decoded under the grammar; None where there is none."""
    try:
        check_grammar({"lark": lark}, "")
    except AgentLightningError as error:
        return str(error).removeprefix(": ")
    return _first_steps(lark)


def _first_steps(lark: str) -> str | None:
    """Follows the grammar over bytes: what allows nothing, or takes too much for a token, shows at its beginning."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    special = re.sub(r"<\[\d+\]>", "<[256]>", lark)  # of the model's vocabulary, which this tokenizer lacks
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(special), log_level=0, limits=parser_limits())
    for _ in range(STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for end in tokenizer.eos_tokens:
            mask &= ~(1 << end)
        if matcher.is_error():
            return f"no completion can follow the grammar: {matcher.get_error().split(chr(10))[0][:200]}"
        if not mask:
            return None
        matcher.consume_token(mask.bit_length() - 1)
    return None


if __name__ == "__main__":
    main()
