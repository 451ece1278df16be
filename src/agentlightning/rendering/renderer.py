"""Renderer: text and token ids of conversations with one model, from its tokenizer folder.

Driven by the conversation graph and the gateway. It compiles the model's own chat template once, as transformers does, and
loads the fast tokenizer without torch. It knows nothing of recorded calls: which prefix is kept is the graph's decision.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import jinja2
import jinja2.meta
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentlightning.errors import InputError, ModelError
from agentlightning.records import JSON, PREFILL, ImageSpan, prefill_of, with_completion
from agentlightning.rendering.completion_parser import THINK_CLOSE, CompletionParser, Syntax, syntax_of
from agentlightning.rendering.families import find_family
from agentlightning.rendering.grammar import Grammars, TemplateModel
from agentlightning.rendering.graph import Arguments
from agentlightning.rendering.images import ImageProcessor
from agentlightning.rendering.model_folder import (
    chat_templates,
    end_ids,
    open_tokenizer,
    read_json,
    special_tokens,
    tokenizer_settings,
)
from agentlightning.rendering.tool_template import tools_as_text, with_tools
from agentlightning.runtime import json_text

PROBE = "agl-probe-7f3a9c"
"""Stands for a completion's text where the template is asked what it puts after one; no template trims or rewrites it."""

MAX_CACHED_TEXT = 16_384
MAX_TEXT = 2 << 20
"""Characters of a prompt, about half a million tokens: all of a server's calls wait for it, and tokenisers read one million
a second where nothing else runs."""


CALL_ID = "aglprobe1"
"""Nine letters and digits, as Mistral's templates want an id."""


_USER: JSON = {"role": "user", "content": "x"}


class RenderError(InputError):
    """The model's chat template does not accept these messages; `param` is the field that it fails on."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class Renderer:
    """Text and token ids for one tokenizer folder.

    `cached_texts` bounds the encodings that are kept, one for each stretch of text between two special tokens: replicas of a
    task share their first prompt, all agents of a run their system message and tools. A chat template that shows no tools is
    given some (`tool_template`). `chat_template` and `tool_syntax` are the configuration's.
    """

    def __init__(
        self,
        folder: str | Path,
        cached_texts: int = 4096,
        *,
        chat_template: str | None = None,
        tool_syntax: Syntax | None = None,
    ) -> None:
        if not Path(folder).is_dir():
            raise ModelError(f"{folder}: no such folder; expected one with a tokenizer")
        settings = tokenizer_settings(Path(folder))
        self._tokenizer = open_tokenizer(Path(folder), settings)
        config = read_json(Path(folder) / "config.json")
        sizes = [one.get("vocab_size") for one in (config, config.get("text_config") or {})]
        self._known_ids = max(self.vocab_size, *(size for size in sizes if isinstance(size, int)), 0)
        self._takes_text, self._call_form = True, _CallForm()
        named = chat_templates(Path(folder), settings, self._tokenizer, chat_template)
        load = partial(self._load_templates, Path(folder), settings)
        self.chat_template = None if chat_template is None else named["default"]
        """The one that exports of the model have, where it is another than the folder's."""
        load(list(dict.fromkeys((named["default"], named.get("tool_use", named["default"])))))
        self._takes_text = self._writes_text()
        self.tool_text = tools_as_text(named["default"])
        """The syntax in which tools are written as text; None where the model's template has tools of its own."""
        own = (settings.get("response_template") or {}).get("fields", {}).get("tool_calls") is not None
        if (syntax := self._missing_syntax(tool_syntax, own)) is not None:
            self.tool_text = syntax
            self.chat_template = with_tools(named["default"], syntax, self._roles(), self._takes_text)
            load([self.chat_template])
        self._cuts = _cuts(self._tokenizer)
        self._encode_cached = lru_cache(maxsize=cached_texts)(self._encode)
        self._special = {
            index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.end_ids = {index: self.token_text(index) for index in end_ids(Path(folder), self._tokenizer)}
        """End tokens: id -> text; first the one that ends a completion under a grammar."""
        if not self.end_ids:
            raise ModelError(
                f"{folder}: nothing ends a completion; expected eos_token in tokenizer_config.json, or eos_token_id in "
                "generation_config.json or config.json"
            )
        self._call_form = self._find_call_form()
        self.closing = self._find_closing()
        """Text that the template puts after a completion's text, before anything else; None where it is unknown."""
        self.parser = CompletionParser(self._source, settings.get("response_template"), self.tool_text)
        self.grammar_model = TemplateModel(
            syntax=self.parser.syntax, thinks=self.parser.thinks, special=_grammar_tokens(self._tokenizer).get
        )
        """The facts that a grammar of completions needs."""
        self.grammars = Grammars(Path(folder), [*self.end_ids])
        # Looked up here, since folders are loaded in a thread: the package takes half a second to import.
        self._family = find_family(self, self._tokenizer)
        self.images = ImageProcessor.find(Path(folder))
        """The processor of images; None where the model has no sight."""

    def render(
        self, messages: list[JSON], tools: list[JSON] | None, generate: bool, template_kwargs: JSON | None = None
    ) -> str:
        """The conversation as text, with the opening of the next completion if `generate`: where that continues the last
        message, up to the end of its text. Messages are normal ones.

        Each image is one placeholder, as the template writes it. `template_kwargs` are further variables of the template.
        """
        if generate and messages and PREFILL in messages[-1] and (begun := prefill_of(messages)) is not None:
            marked = {**begun, "content": begun["content"] + PROBE}
            text, found, _ = self.render([*messages[:-1], marked], tools, False, template_kwargs).rpartition(PROBE)
            if not found:
                raise RenderError("messages: the model's chat template does not write the text that is to be continued")
            return text
        if not self._takes_text:
            messages = [_in_parts(message) for message in messages]
        if self._call_form != _CallForm():
            messages = [self._call_form.of(message) if "tool_calls" in message else message for message in messages]
        try:
            given: JSON = {"documents": None, **(template_kwargs or {}), **self._variables}
            return (self._template if tools is None else self._tool_template).render(
                {**given, "messages": messages, "tools": tools, "add_generation_prompt": generate}
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as cause:
            if not self._call_form.text:
                self._check_arguments(messages, tools, template_kwargs)
            refuses = isinstance(cause, jinja2.TemplateError)
            what = f"refuses them: {cause}" if refuses else f"fails on them: {type(cause).__name__}: {cause}"
            raise RenderError(f"messages: the model's chat template {what}") from cause

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """Encodes `text` as a continuation of the special token `after`, or as a beginning."""
        if len(text) > MAX_TEXT:
            check_text(text)
        anchor = self._special.get(after, "") if after is not None else ""
        ids: list[int] = []
        for start, end in self._stretches(text):
            stretch, anchor = text[start:end], "" if start else anchor
            known = end - start <= MAX_CACHED_TEXT
            ids += self._encode_cached(stretch, anchor) if known else self._encode(stretch, anchor)
        return ids

    def decode(self, ids: list[int], special: bool = False) -> str:
        """Text of ids; with `special`, special tokens are written out as templates write them."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=not special))

    @property
    def vocab_size(self) -> int:
        """Number of the tokenizer's tokens, added ones among them."""
        return int(self._tokenizer.get_vocab_size())

    def unknown_id(self, ids: Sequence[int]) -> int | None:
        """The first id that is beyond the vocabulary, of the tokenizer and, where it is known, of the model; None where none
        is."""
        if max(ids, default=0) < self._known_ids:
            return None
        return next((one for one in ids if one >= self._known_ids and self._tokenizer.id_to_token(one) is None), None)

    def pieces(self, ids: list[int]) -> list[str]:
        """Tokens as the vocabulary writes them."""
        return [self._tokenizer.id_to_token(index) or "" for index in ids]

    def token_text(self, index: int) -> str:
        """Text of one token alone."""
        return str(self._tokenizer.decode([index], skip_special_tokens=False))

    def split_end(self, ids: list[int]) -> tuple[list[int], int | None]:
        """Sampled ids without the token that ended the completion, and that token (None where the completion was cut)."""
        if ids and ids[-1] in self.end_ids:
            return ids[:-1], ids[-1]
        return ids, None

    def text_stream(self) -> TextStream:
        """Decodes ids as they are sampled."""
        return TextStream(self._tokenizer, special=self.parser.needs_special)

    def special_id(self, text: str) -> int | None:
        """The special token that is written as `text`."""
        index = self._tokenizer.token_to_id(text)
        return index if index in self._special else None

    def reasoning_size(self, ids: list[int], reasoning: str | None) -> int:
        """Number of sampled ids up to the end of the reasoning that was read in them, its marks among them.

        Where the end mark is no token of its own, the count is that of the reasoning encoded alone.
        """
        if not reasoning:
            return 0
        end = self._tokenizer.token_to_id(THINK_CLOSE)
        if end is not None and end in ids:
            return ids.index(end) + 1
        return min(len(ids), len(self.encode(reasoning)))

    def after_answer(self, end: int | None, rest: str, whole: str) -> str | None:
        """The text after sampled ids that ended with token `end` (None: cut), where the template goes on with `rest`
        after its closing; None where the template, by its rendering `whole`, uses that token for something else.

        Some templates write no closing: the end token is the opening of the next message. Others never write the end
        token at all; it stays in the prompt, where the model put it.
        """
        closing = self.closing or ""
        if end is None:
            return closing + rest
        text = self.end_ids[end]
        _, closed, after = closing.partition(text)
        if closed:
            return after + rest
        if not closing and rest.startswith(text):
            return rest[len(text) :]
        written = text in whole or text in self._source or any(special in closing for special in self._special.values())
        return None if written else closing + rest

    def bridge(
        self,
        prompt_ids: list[int],
        sampled_ids: list[int],
        new_messages: list[JSON],
        tools: list[JSON] | None,
        template_kwargs: JSON | None = None,
    ) -> list[int] | None:
        """The ids that follow `prompt_ids + sampled_ids`, with the opening of the next completion: the model's family's.

        Messages are normal ones, none of them a completion. What was sampled stays to the last id, thinking as well,
        whatever the template would make of it; the ids of the new messages are the template's own. None where the model's
        family is not known or not needed, and where it does not go on as the template does.
        """
        if self._family is None:
            return None
        return self._family.bridge(prompt_ids, sampled_ids, new_messages, tools, template_kwargs)

    def completion_ids(
        self,
        prompt_ids: list[int],
        messages: list[JSON],
        tools: list[JSON] | None,
        completion: JSON,
        template_kwargs: JSON | None = None,
    ) -> list[int] | None:
        """The ids that the model would have sampled after `prompt_ids` to say this completion, with the token that ends it;
        None where the template does not write it as the continuation of its own opening. Messages are normal ones."""
        opening = self.render(messages, tools, True, template_kwargs)
        whole = self.render(with_completion(messages, completion), tools, False, template_kwargs)
        if not whole.startswith(opening):
            return None
        ids = self.encode(whole[len(opening) :], after=prompt_ids[-1] if prompt_ids else None)
        ends = [place for place, token in enumerate(ids) if token in self.end_ids]
        if ends:
            return ids[: ends[-1] + 1]
        # Where the template never writes an end token, the model stops by one all the same.
        return [*ids, *list(self.end_ids)[:1]]

    def expand(
        self, ids: list[int], hashes: Sequence[str], expansions: Mapping[str, list[int]]
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """The ids with each image's own in the place of its placeholder, and where those are. RenderError where the text
        itself holds a placeholder, or where an image is not at hand."""
        if self.images is None and not hashes:
            return ids, ()
        places = [at for at, index in enumerate(ids) if self.images and index == self.images.placeholder_id]
        if len(places) != len(hashes):
            if self.images is None:
                raise RenderError("messages: the model has no sight; expected text only")
            if not hashes:
                raise RenderError("messages: the text holds the model's placeholder of an image; leave it out")
            raise RenderError(
                f"messages: the prompt has {len(places)} placeholders for {len(hashes)} images: the text holds one itself, "
                "or the model's chat template leaves an image out"
            )
        whole: list[int] = []
        spans: list[ImageSpan] = []
        before = 0
        for at, name in zip(places, hashes, strict=True):
            if name not in expansions:
                raise RenderError(f"messages: the image {name[:12]}… is not at hand")
            whole += ids[before:at]
            spans.append(ImageSpan(hash=name, start=len(whole), end=len(whole) + len(expansions[name])))
            whole += expansions[name]
            before = at + 1
        return whole + ids[before:], tuple(spans)

    def left_out(self) -> list[str]:
        """Sentences about what the model's chat template does not know, and what is done about it."""
        said = []
        if self.tool_text is not None:
            said.append(
                f"tools, if the agent has any, are written into the system message as text ({self.tool_text}): the chat "
                "template has none"
            )
            if '"system": "user"' in self._source:  # as `with_tools` writes it
                said.append("system messages are put before the first user's: the chat template takes none")
        return said

    def _load_templates(self, folder: Path, settings: JSON, sources: list[str]) -> None:
        """Take these chat templates: for requests without and with tools."""
        self._source = "\n".join(sources)
        compiled = [_compiled(source, folder) for source in sources]
        self._template, self._tool_template = compiled[0], compiled[-1]
        read = frozenset[str]().union(*map(_free_variables, compiled, sources))
        self._variables = _special_variables(folder, settings, read, self._tokenizer)
        self.variables = read - {"messages", "tools", *self._variables}
        """Names that the chat template reads beside those that it always gets: `chat_template_kwargs` may set them."""

    def _missing_syntax(self, wanted: Syntax | None, own: bool) -> Syntax | None:
        """The syntax in which tools are still to be written as text: the wanted one, else where the template shows none and
        the tokenizer has no way of its `own` of reading calls."""
        if wanted is None and (own or self.tool_text is not None or self._shows([_USER], [_tool(PROBE)])):
            return None
        wanted = wanted or syntax_of(self._source) or "hermes"
        return None if wanted == self.tool_text else wanted

    def _roles(self) -> dict[str, str]:
        """The roles that messages get where the template may not know theirs. Results of calls are a user's, which every
        template knows, but where it then drops the reasoning that led to the calls."""
        reasoned: JSON = {"role": "assistant", "content": "x", "reasoning_content": PROBE}
        followed = [[_USER, reasoned, {"role": role, "content": "x"}] for role in ("user", "tool")]
        keeps = self._shows([{"role": "system", "content": PROBE}, _USER], None)
        roles = {} if keeps else {"system": "user"}
        return roles if [self._shows(one, None) for one in followed] == [False, True] else {"tool": "user", **roles}

    def _shows(self, messages: list[JSON], tools: list[JSON] | None) -> bool:
        """True where the template writes PROBE, which is a part of these."""
        try:
            return PROBE in self.render(messages, tools, True)
        except RenderError:
            return False

    def _writes_text(self) -> bool:
        """False where the template writes content only if it is a list of parts, as those of some models with sight do."""
        try:
            return PROBE in self.render([_USER | {"content": PROBE}], None, True)
        except RenderError:
            return True

    def _check_arguments(self, messages: list[JSON], tools: list[JSON] | None, template_kwargs: JSON | None) -> None:
        """RenderError for the first tool call whose arguments are no object, where the template fails on that alone."""
        broken: list[tuple[str, str]] = []
        emptied = list(messages)
        for index, message in enumerate(messages):
            calls = []
            for place, call in enumerate(message.get("tool_calls") or ()):
                function = call["function"]
                if not isinstance(function["arguments"], dict):
                    path = f"messages[{index}].tool_calls[{place}].function.arguments"
                    broken.append((path, str(function["arguments"])))
                    function = {**function, "arguments": {}}
                calls.append({**call, "function": function})
            if calls:
                emptied[index] = {**message, "tool_calls": calls}
        if not broken:
            return
        try:
            self.render(emptied, tools, False, template_kwargs)
        except RenderError:
            return
        path, text = broken[0]
        raise RenderError(f"{path}: expected a JSON object, got {text[:58]!r}{'…' * (len(text) > 58)}", path)

    def _find_call_form(self) -> _CallForm:
        """The form of a tool call in which the template writes its arguments as JSON, or as it teaches."""
        arguments = Arguments({"x": PROBE}, f'{{"x": "{PROBE}"}}')
        call = {"id": CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages: list[JSON] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": CALL_ID, "content": "x"},
        ]
        for form in (_CallForm(), _CallForm(text=True), _CallForm(null=True), _CallForm(text=True, null=True)):
            try:
                written = self.render(list(map(form.of, messages)), [_tool("probe")], True)
            except RenderError:
                continue
            if PROBE in written and f"'{PROBE}'" not in written:  # which is how Python writes a text
                return form
        return _CallForm()

    def _stretches(self, text: str) -> list[tuple[int, int]]:
        """Start and end of the parts of `text` that are tokenised independently."""
        if self._cuts is None:
            return [(0, len(text))]
        pattern, cutting = self._cuts
        starts = [0]
        for found in pattern.finditer(text):
            if found.start() and found.group() in cutting:
                starts.append(found.start())
        return list(zip(starts, [*starts[1:], len(text)], strict=True))

    def _encode(self, text: str, anchor: str) -> array[int]:
        # A batch, since only for batches the tokenizer offers to leave out offsets, a quarter of the work.
        ids: list[int] = self._tokenizer.encode_batch_fast([anchor + text], add_special_tokens=False)[0].ids
        return array("i", ids[1:] if anchor else ids)  # a tenth of a list's bytes: thousands are cached

    def _find_closing(self) -> str | None:
        """Compares a completion that is last with one that is followed by a question: what both put after the text."""
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
        tails = []
        for messages, generate in ((turn, False), ([*turn, turn[0]], True)):
            try:
                tails.append(self.render(messages, None, generate).rpartition(PROBE))
            except RenderError:
                continue
        if not tails or any(not found for _, found, _ in tails):
            return None
        if len(tails) == 1:
            return tails[0][2]
        last, followed = (self._tokenizer.encode(tail, add_special_tokens=False) for _, _, tail in tails)
        end = 0
        for left, right, (_, stop) in zip(last.ids, followed.ids, last.offsets, strict=False):
            if left != right:
                break
            end = stop
        return tails[0][2][:end]


def check_text(*values: object) -> None:
    """RenderError where texts, or messages and tools as JSON, have more characters than a prompt may have."""
    if (size := sum([len(one) if isinstance(one, str) else len(json_text.dumps(one)) for one in values])) > MAX_TEXT:
        raise RenderError(f"messages: the prompt has {size} characters to tokenise; expected at most {MAX_TEXT}")


@dataclass(frozen=True, slots=True)
class _CallForm:
    """The form in which a template wants tool calls."""

    text: bool = False
    """Arguments as a text, as DeepSeek's templates do, and not as a mapping."""
    null: bool = False
    """The content of a message with calls and no text is None, not empty."""

    def of(self, message: JSON) -> JSON:
        """The message in this form."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self.text:
            calls = [{**call, "function": {**call["function"], "arguments": _text(call)}} for call in calls]
        content = message["content"]
        return {**message, "content": None if self.null and not content else content, "tool_calls": calls}


def _text(call: JSON) -> str:
    """Arguments as they came."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, Arguments):
        return arguments.text
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _in_parts(message: JSON) -> JSON:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


class TextStream:
    """Incremental decoding that never splits a character."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=not special)

    def feed(self, ids: list[int]) -> str:
        """Text that these ids complete."""
        text = ""
        for index in ids:
            text += self._stream.step(self._tokenizer, index) or ""
        return text


# --- loading ------------------------------------------------------------------------------------------------------


def _tool(name: str) -> JSON:
    function = {"name": name, "description": "x", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def _special_variables(folder: Path, settings: JSON, read: frozenset[str], tokenizer: Tokenizer) -> dict[str, str]:
    """Special tokens by the names that templates know. Those that the template reads must be tokens, and be named, if only
    as null: the names that a tokenizer's class stands for are transformers' to know."""
    tokens = special_tokens(settings)
    unnamed = [name for name in ("bos_token", "eos_token", "pad_token", "unk_token") if name in read - settings.keys()]
    if unnamed:
        from transformers import AutoTokenizer

        with suppress(OSError, ValueError):
            tokens = {**AutoTokenizer.from_pretrained(str(folder)).special_tokens_map, **tokens}
        if (missing := next((name for name in unnamed if name not in tokens), None)) is not None:
            raise ModelError(f"{folder}: its chat template writes {missing}, which tokenizer_config.json does not name")
    for name in sorted(read & tokens.keys()):
        if tokenizer.token_to_id(tokens[name]) is None:
            raise ModelError(f"{folder}: its {name} {tokens[name]!r}, which the chat template writes, is no token")
    return tokens


def _cuts(tokenizer: Tokenizer) -> tuple[re.Pattern[str], frozenset[str]] | None:
    """A pattern of the tokens that a tokenizer finds in raw text first, and those at whose start a text may be cut.

    It looks for these leftmost and longest, and then treats each part between them alone. A token that also takes the
    white space before it forbids the cut there; one that is found only between non-word characters, all cuts.
    """
    found = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized and token.content]
    cutting = frozenset(token.content for token in found if not token.lstrip)
    if not cutting or any(token.single_word for token in found):
        return None
    longest_first = sorted((token.content for token in found), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))), cutting


def _grammar_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens that llguidance takes for special ones, by text: those that are, and added ones that are written so."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        token.content: index
        for index, token in added
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _compiled(template: str, folder: str | Path) -> jinja2.Template:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        compiled: jinja2.Template = _compile_jinja_template(template)
        compiled.globals = dict(compiled.globals)  # a chain of them, of which each rendering made a dict twice
    except jinja2.TemplateError as cause:
        raise ModelError(f"{folder}: its chat template does not compile: {cause}") from cause
    return compiled


def _free_variables(template: jinja2.Template, source: str) -> frozenset[str]:
    """Names that a template reads and that are neither its own nor the language's."""
    found = jinja2.meta.find_undeclared_variables(template.environment.parse(source))
    return frozenset(found - template.environment.globals.keys() - {"add_generation_prompt"})
