"""Fields of requests: the types that protocols share, and one place that turns msgspec's errors into sentences.

A protocol's parser reads a body with `read` into a `msgspec.Struct`. Missing and null fields have their defaults; a value of
another kind is an ApiError whose `param` is the field's path, and whose sentence says what was expected. Unknown fields are
passed over, save those of the tables below. Pure: knows no protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta, Struct, inspect

from agentlightning.protocols.base import ApiError, check_parts, short
from agentlightning.records import JSON, PREFILL, TEMPLATE_KWARGS
from agentlightning.runtime import json_text

S = TypeVar("S", bound=Struct)

MAX_INTEGER = 2**63 - 1
MAX_CHOICES = 128
MAX_STOPS = 1024
"""Stop strings, and stop tokens: each token that is sampled is compared with all of them."""
MAX_TOP_LOGPROBS = 20
"""Alternatives that may be listed with a token: as many as vLLM gives where it is started without --max-logprobs."""
MAX_BIASED = 1024
"""Tokens that `logit_bias` and `allowed_token_ids` may name; OpenAI's own bound is 300."""

Flag = bool | None
Text = str | None
Record = JSON | None
Whole = Annotated[int, Meta(ge=0, le=MAX_INTEGER)] | None
Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)] | None
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None
Alternatives = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None
Seed = Annotated[int, Meta(ge=-MAX_INTEGER - 1, le=MAX_INTEGER)] | None
Share = Annotated[float, Meta(ge=0, le=1)] | None
Temperature = Annotated[float, Meta(ge=0, le=2)] | None
Penalty = Annotated[float, Meta(ge=-2, le=2)] | None
Repetition = Annotated[float, Meta(ge=0.01, le=100)] | None
"""Of a smaller one a logit may become infinite: it is divided by the penalty."""
TopK = Annotated[int, Meta(ge=-1, le=MAX_INTEGER)] | None
Word = Annotated[str, Meta(min_length=1)]
Stops = Annotated[Word | list[Word], Meta(description="a string or a list of strings, none empty")] | None
Arguments = Annotated[str | JSON, Meta(description="a JSON object as a string")]
"""Of a tool call: the object itself is taken, too."""
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(description="a list of token ids")] | None


class ExternalRequest(Struct):
    """The recorded fields of a request that goes to an external model as it is."""

    model: Text = None
    stream: Flag = None
    tools: list[Any] | None = None


class SampledRequest(ExternalRequest, kw_only=True):
    """Fields of OpenAI's protocols and of the engines behind them that say how a completion is drawn."""

    temperature: Temperature = None
    top_p: Share = None
    seed: Seed = None
    stop: Stops = None
    include_stop_str_in_output: Flag = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Repetition = None
    min_p: Share = None
    top_k: TopK = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    min_tokens: Whole = None
    ignore_eos: Flag = None
    allowed_token_ids: TokenIds = None
    structured_outputs: Record = None
    chat_template_kwargs: Record = None


class IdsRequest(SampledRequest, kw_only=True):
    """The same, with the fields in which vLLM's clients speak of ids."""

    n: Choices = None
    stop_token_ids: TokenIds = None
    return_token_ids: Flag = None
    return_tokens_as_token_ids: Flag = None
    prompt_logprobs: Alternatives = None
    stream_options: Record = None
    response_format: Record = None
    echo: Flag = None


class FunctionTool(Struct):
    """The definition of a function. With `strict` its calls are sampled under a grammar; see fields.py."""

    name: Annotated[str, Meta(min_length=1, description="the name of a function")]
    description: Text = None
    parameters: Record = None
    strict: Flag = None


class StreamOptions(Struct):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None


ENGINE_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "top_a": (0,), "typical_p": (1,), "repeat_penalty": (1,), "length_penalty": (1,), "skip_special_tokens": (True,),
    "bad_words": ([],), "logits_processors": ([],), "use_beam_search": (False,), "truncate_prompt_tokens": (),
    "add_special_tokens": (False,), "logprob_token_ids": ([],), "prompt_embeds": ("", []), "kv_transfer_params": ({},),
    "ec_transfer_params": ({},), "mm_processor_kwargs": ({},), "vllm_xargs": ({},), "repetition_detection": ({},),
    "thinking_token_budget": (-1,), "watermarking": (False,), "stop_regex": ("", []), "lora_path": ("", []),
    
    "top_n_sigma": (0, -1), "mirostat": (0,), "dynatemp_range": (0,), "xtc_probability": (0,), "dry_multiplier": (0,),
}  # fmt: skip
"""Sampling fields that the OpenAI APIs and the engines behind them (vLLM, SGLang, llama.cpp) take in common and that nobody
accounts for, with the values that change nothing; those that are honoured are read by fields.py."""

CHOICE_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "response_format": ({}, {"type": "text"}),
}  # fmt: skip
"""Fields of Chat Completions and Completions: for the protocols that say these things otherwise, or not at all."""

TOKEN_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "prompt_logprobs": (), "stop_token_ids": ([],),
}  # fmt: skip
"""Fields in which vLLM's clients speak of ids: for the protocols that have no place for them."""

SAMPLING_PARAMS: Mapping[str, tuple[Any, ...]] = {
    **CHOICE_PARAMS, "top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "min_p": (0,), "logit_bias": ({},), "seed": (), "stop": ("", []), "include_stop_str_in_output": (False,),
    "min_tokens": (0,), "ignore_eos": (False,), "allowed_token_ids": ([],), "structured_outputs": ({},),
}  # fmt: skip
"""Fields that are honoured elsewhere: for a protocol that has no place for them."""

ENGINE_REFUSED: Mapping[str, tuple[Any, str]] = {
    "request_id": (None, "the id of a response is that of its recorded call; leave it out"),
    "return_prompt_text": (False, "the response has no prompt_text; ask for return_token_ids"),
    "return_hidden_states": (False, "hidden states are not kept; leave it out"),
    "separate_reasoning": (True, "reasoning stands apart from the text; leave it out"),
    "no_stop_trim": (False, "a stop string is cut off; ask for include_stop_str_in_output"),
    "prompt_token_ids": ([], "ids are read at /v1/tokens/generate, or as the prompt of Completions"),
}
"""Fields of vLLM and SGLang that no setting makes the gateway serve: neutral value, why."""

NOT_APPLIED = (
    "priority", "cache_salt", "session_id", "spaces_between_special_tokens", "stream_interval", "truncation_side",
    "media_io_kwargs",
)  # fmt: skip
"""Fields of vLLM that change when and how a completion is served, and not the completion; they are recorded."""

RESERVED_VARIABLES = frozenset({
    "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
    "tokenizer_kwargs", "bos_token", "eos_token", "pad_token", "unk_token",
})  # fmt: skip
"""Names in `chat_template_kwargs` that are no settings of a template: its input, and options of transformers' function."""


# --- reading ------------------------------------------------------------------------------------------------------------


def read(kind: type[S], data: Any, at: str = "") -> S:
    """The fields of an object that `kind` has. Raises ApiError, naming the field below `at` and what was expected."""
    seen = ""
    while True:
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as cause:
            error = str(cause)
            if "got `float`" not in error or error == seen:
                raise _refusal(kind, data, error, at) from None
            seen, data = error, _with_whole_numbers(data, _steps(error))


_PLACE = re.compile(r" - at `\$(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(.+?)`")


def _steps(error: str) -> list[str]:
    """The names and numbers by which msgspec's error says where it is."""
    place = _PLACE.search(error)
    return [name or index for name, index in _STEP.findall(place[1])] if place else []


def _with_whole_numbers(data: Any, steps: Sequence[str]) -> Any:
    """The data with ``50`` for the ``50.0`` at this place, as JavaScript and Go may write it, and likewise in the rest of
    its list."""
    if not steps:
        return whole(data)
    if isinstance(data, list):
        at = int(steps[0])
        inner = _with_whole_numbers(data[at], steps[1:])
        return [whole(one) for one in data] if len(steps) == 1 else [*data[:at], inner, *data[at + 1 :]]
    if isinstance(data, dict) and steps[0] in data:
        return {**data, steps[0]: _with_whole_numbers(data[steps[0]], steps[1:])}
    return data


def whole(value: Any) -> Any:
    """A float without a fraction as an integer, all else as it is.

    >>> whole(50.0), whole(0.5), whole("50.0")
    (50, 0.5, '50.0')
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refusal(kind: type[Struct], data: Any, error: str, at: str) -> ApiError:
    """The sentence of msgspec's error: its path is followed through the type and the value to what was expected there."""
    steps = _steps(error)
    if missing := _MISSING.match(error):
        steps.append(missing[1])
    node: inspect.Type = inspect.type_info(kind)
    value, path = data, at
    for step in steps:
        if _description(node):
            break
        node = _branch(node, value)
        if isinstance(node, inspect.StructType):
            node = next(one for one in node.fields if one.encode_name == step).type
            path, value = f"{path}.{step}" if path else step, value.get(step)
        elif isinstance(node, inspect.ListType):
            node, path, value = node.item_type, f"{path}[{step}]", value[int(step)]
        elif isinstance(node, inspect.DictType):
            node = node.value_type
            name = next(name for name, one in value.items() if not _fits(one, node))
            path, value = f"{path}.{name}", value[name]
    return ApiError(f"{path}: expected {_expected(node)}, got {short(value)}", param=path)


def _fits(value: Any, node: inspect.Type) -> bool:
    low, high = getattr(node, "ge", None), getattr(node, "le", None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (low is None or value >= low) and (high is None or value <= high)


def _description(node: inspect.Type) -> str:
    """The description of a type, or of a member of a union."""
    members = node.types if isinstance(node, inspect.UnionType) else (node,)
    said = [one.extra_json_schema or {} for one in members if isinstance(one, inspect.Metadata)]
    return next((str(one["description"]) for one in said if "description" in one), "")


def _branch(node: inspect.Type, value: Any) -> inspect.Type:
    """The member of a union that a container is."""
    members = node.types if isinstance(node, inspect.UnionType) else (node,)
    kind = inspect.ListType if isinstance(value, list) else inspect.StructType | inspect.DictType
    plain = [one.type if isinstance(one, inspect.Metadata) else one for one in members]
    return next(one for one in plain if isinstance(one, kind))


def _expected(node: inspect.Type) -> str:
    if said := _description(node):
        return said
    match node:
        case inspect.UnionType(types=types):
            return " or ".join(_expected(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.IntType(ge=low, le=high) if low is not None:
            return (
                f"a whole number of at least {low}" if high == MAX_INTEGER else f"a whole number from {low} to {high}"
            )
        case inspect.FloatType(ge=low, le=high) if low is not None:
            return f"a number from {low:g} to {high:g}"
        case inspect.LiteralType(values=values):
            return " or ".join((", ".join(map(str, values[:-1])), str(values[-1])))
    names: dict[type, str] = {
        inspect.StrType: "a string", inspect.BoolType: "true or false", inspect.IntType: "a whole number",
        inspect.FloatType: "a number", inspect.ListType: "a list",
    }  # fmt: skip
    return names.get(type(node), "an object")


# --- several values -----------------------------------------------------------------------------------------------------


def stops(given: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Stop strings, from one string or a list of them."""
    return () if given is None else (given,) if isinstance(given, str) else bounded(given, name, MAX_STOPS)


def bounded(values: list[Any] | None, name: str, most: int) -> tuple[Any, ...]:
    """The members of a list, if there are at most so many."""
    if values and len(values) > most:
        raise expected(f"at most {most} members", len(values), name)
    return tuple(values or ())


def forced(data: JSON) -> JSON:
    """`temperature` and `top_p` as given, which the rollout's own override."""
    return {name: data[name] for name in ("temperature", "top_p") if data.get(name) is not None}


def token_options(asked: IdsRequest) -> dict[str, Any]:
    """The fields of a CompletionRequest that ask for ids, and for log-probabilities of the prompt, as vLLM takes them."""
    if asked.prompt_logprobs is not None and asked.stream:
        raise ApiError(
            'prompt_logprobs: not available where "stream" is true, as with vLLM; ask for them without streaming',
            param="prompt_logprobs",
        )
    return {
        "stop_ids": bounded(asked.stop_token_ids, "stop_token_ids", MAX_STOPS),
        "return_token_ids": asked.return_token_ids,
        "tokens_as_ids": bool(asked.return_tokens_as_token_ids),
        "prompt_logprobs": asked.prompt_logprobs,
    }


def reserved_variables(given: JSON | None) -> dict[str, str]:
    """Those of `chat_template_kwargs` that are refused, with the reason."""
    why = "not a variable that a request may give to the chat template; leave it out"
    return {f"{TEMPLATE_KWARGS}.{name}": why for name in given or () if name in RESERVED_VARIABLES}


def engine_refused(data: JSON) -> dict[str, str]:
    """The fields of ENGINE_REFUSED that a request has, with the reason why they are refused."""
    found = sorted(ENGINE_REFUSED.keys() & data.keys())
    return {name: ENGINE_REFUSED[name][1] for name in found if data[name] not in (None, ENGINE_REFUSED[name][0])}


def unsupported(data: JSON, params: Mapping[str, tuple[Any, ...]], at: str = "") -> JSON:
    """The fields of `params`, by path, whose values would change what is sampled, as the agent gave them."""
    found = [name for name in sorted(params.keys() & data.keys()) if not _among(data[name], (None, *params[name]))]
    return {f"{at}.{name}" if at else name: data[name] for name in found}


def not_applied(data: JSON | None, names: Iterable[str], at: str = "") -> JSON:
    """The fields among `names`, by path, that ask for what no trained policy has a setting for."""
    return {f"{at}.{name}" if at else name: data[name] for name in names if data and data.get(name) is not None}


def given(data: JSON, names: Iterable[str], neutral: Sequence[Any] = (None, False, [], {})) -> JSON:
    """The fields among `names` with a value that is not neutral."""
    return {name: data[name] for name in names if name in data and not _among(data[name], neutral)}


def services(data: JSON, names: Iterable[str]) -> dict[str, str]:
    """The fields among `names` that a provider's service would have to serve, with the reason why they are refused."""
    found = given(data, names, neutral=(None, False, "", [], {}))
    return {name: f"{short(one)} is not supported by the trained policy; leave it out" for name, one in found.items()}


def user_message(data: JSON, name: str) -> JSON:
    """A field of any kind as the message of a user, for the record: text as it is, all else as JSON."""
    value = data.get(name)
    return {"role": "user", "content": value if isinstance(value, str) else json_text.dumps(value).decode()}


def split_tools(tools: list[Any] | None) -> tuple[dict[str, JSON], JSON]:
    """Function tools and the others, which no policy can be trained to use: they are run by a provider. By path."""
    functions: dict[str, JSON] = {}
    others: JSON = {}
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise expected('{"type": "function", …}', tool, where)
        (functions if kind == "function" else others)[where] = tool
    return functions, others


def arguments_text(given: str | JSON) -> str:
    """The arguments of a tool call as text."""
    return given if isinstance(given, str) else json_text.dumps(given).decode()


def begun(messages: list[JSON]) -> list[JSON]:
    """The messages with the last one marked as begun by the agent: the completion continues it. Refuses what cannot be
    continued."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, list) and all(part.get("type") in ("text", "refusal") for part in content):
        content = "".join(part.get("text") or part.get("refusal") or "" for part in content)
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(content, str) or not content.strip():
        raise refused(
            "messages",
            "expected the last one to be the assistant's, with text and no tool calls, for it to be continued",
        )
    return [*before, {**last, "content": content, PREFILL: True}]


def expected(what: str, value: Any, name: str, at: str = "") -> ApiError:
    """The refusal of a value that is not what was expected."""
    path = f"{at}.{name}" if at else name
    return ApiError(f"{path}: expected {what}, got {short(value)}", param=path)


def refused(path: str, why: str) -> ApiError:
    """The refusal of a value that the trained policy does not serve."""
    return ApiError(f"{path}: {why}", param=path, code="unsupported_value")


def not_text(part: Any, path: str) -> ApiError:
    return refused(path, f"expected a text or an image part, all that the trained policy reads here, got {short(part)}")


def _among(value: Any, neutral: Sequence[Any]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of vLLM's `structured_outputs`, of which a request has one."""

WITHOUT_EFFECT = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "backend"})
"""Options of `structured_outputs` beside these: white space is always settled, and there is one backend."""

GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar",
}  # fmt: skip
"""Older names of vLLM, and those of SGLang and llama.cpp, for what `structured_outputs` says."""


_LOGITS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "ignore_eos")


def logits(asked: SampledRequest) -> JSON:
    """Penalties, `logit_bias`, `top_k`, `min_p` and vLLM's bounds on tokens, where they are not neutral."""
    found: JSON = {name: value for name in _LOGITS if (value := getattr(asked, name))}
    if found.get("repetition_penalty") == 1:
        del found["repetition_penalty"]
    if (top_k := asked.top_k) is not None and top_k > 0:
        found["top_k"] = top_k
    if asked.logit_bias and (bias := _logit_bias(asked.logit_bias)):
        found["logit_bias"] = bias
    if (ids := asked.allowed_token_ids) is not None:
        if not 0 < len(ids) <= MAX_BIASED:
            raise expected(f"1 to {MAX_BIASED} token ids", ids, "allowed_token_ids")
        found["allowed_token_ids"] = sorted(set(ids))
    return found


class Format(Struct):
    """A form of the content; Chat has the schema one level deeper."""

    type: Annotated[Literal["text", "json_object", "json_schema"], Meta(description="text, json_object or json_schema")]
    schema: Record = None
    description: Text = None
    json_schema: Record = None


class _Schema(Struct):
    schema: Record = None
    description: Text = None


def content(value: JSON | None, path: str = "response_format") -> JSON:
    """``content`` of the grammar by a format as the OpenAI protocols have it, or Anthropic's; empty for text."""
    form = None if value is None else read(Format, value, path)
    if value is None or form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"content": {"kind": "json_object", "field": path}}
    holder: Format | _Schema = form
    if "schema" not in value and form.json_schema is not None:
        holder = read(_Schema, form.json_schema, f"{path}.json_schema")
    # OpenAI's schema may be left out: any JSON
    shown: JSON = {"kind": "json_schema", "schema": holder.schema or {}, "field": path}
    return {"content": shown | ({"description": holder.description} if holder.description else {})}


def structured_outputs(data: JSON) -> JSON:
    """``content`` of the grammar by vLLM's `structured_outputs` or the older fields; empty where there is none."""
    given = data.get("structured_outputs")
    found: list[JSON] = []
    if given is not None:
        wrong = [one for one in given if one not in STRUCTURED and one not in WITHOUT_EFFECT and given[one] is not None]
        found = [
            _content(name, given[name], f"structured_outputs.{name}")
            for name in STRUCTURED
            if given.get(name) not in (None, False) and not wrong
        ]
        if wrong or not (found or "structural_tag" in given):
            raise expected(f"one of {', '.join(STRUCTURED)}", wrong[0] if wrong else given, "structured_outputs")
    found += [_content(kind, data[name], name) for name, kind in GUIDED.items() if data.get(name) not in (None, False)]
    return combined({}, *({"content": one} for one in found))


def _content(kind: str, value: Any, path: str) -> JSON:
    if kind == "json":
        schema = _json_object(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise expected("a JSON schema", value, path)
        check_parts(schema, path)
        return {"kind": "json_schema", "schema": schema, "field": path}
    if kind == "json_object":
        if value is not True:
            raise expected("true or false", value, path)
        return {"kind": "json_object", "field": path}
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise expected("a list of texts, none empty", value, path)
        return {"kind": "choice", "choices": value, "field": path}
    if not isinstance(value, str) or not value:
        raise expected("a text that is not empty", value, path)
    if kind == "regex":
        return {"kind": "regex", "pattern": value, "field": path}
    return {"kind": "lark", "lark": value, "field": path}


def combined(tool_call: JSON, *contents: JSON) -> JSON:
    """The grammar of a request from its parts. Raises ApiError where two say what the content must be."""
    found = [one["content"] for one in contents if one]
    if len(found) > 1:
        raise ApiError(
            f"{found[1]['field']}: expected one grammar in a request, and {found[0]['field']} gives one",
            param=found[1]["field"],
        )
    return {**({"content": found[0]} if found else {}), **({"tool_call": tool_call} if tool_call else {})}


def tool_call(choice: Any, tools: list[JSON] | None, field: str = "tool_choice") -> JSON:
    """``tool_call`` of the grammar by OpenAI's `tool_choice` and `strict` of the tools; empty where neither asks for one.

    Raises ApiError where a name is none of the tools'.
    """
    if choice == "required":
        return forced_call(None, tools, field)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        inner = choice.get("function") or choice.get("custom")
        return forced_call([(inner if isinstance(inner, dict) else choice).get("name")], tools, field)
    if kind == "allowed_tools":
        return _allowed(choice, tools, field)
    return strict(tools)


def strict(tools: list[JSON] | None) -> JSON:
    """``tool_call`` of the grammar where a tool is `strict`: calls follow the schemas, and none need be made."""
    for index, tool in enumerate(tools or ()):
        if tool["function"].get("strict") is True:
            return {"required": False, "names": None, "field": f"tools[{index}].function.strict"}
    return {}


def forced_call(names: list[Any] | None, tools: list[JSON] | None, field: str = "tool_choice") -> JSON:
    """``tool_call`` of the grammar where a call must be made: of the tool in `names`, or of any."""
    if names is None and not tools:
        raise ApiError(f"{field}: a tool call is required, and the request has no tools", param=field)
    if names is None:
        return {"required": True, "names": None, "field": field}
    return {"required": True, "names": [_known(name, tools, field) for name in names], "one": True, "field": field}


def _allowed(choice: JSON, tools: list[JSON] | None, field: str) -> JSON:
    inner = choice.get("allowed_tools")
    given = inner if isinstance(inner, dict) else choice
    mode, listed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise expected("auto or required", mode, "mode", field)
    if not isinstance(listed, list) or not listed:
        raise expected("a list of at least one tool", listed, "tools", field)
    names = []
    for tool in listed:
        named = tool.get("function", tool) if isinstance(tool, dict) else None
        named = named if isinstance(named, dict) else tool
        names.append(_known(named.get("name") if isinstance(named, dict) else None, tools, field))
    return {"required": mode == "required", "names": names, "field": field}


def _known(name: Any, tools: list[JSON] | None, field: str) -> str:
    named = [tool["function"]["name"] for tool in tools or ()]
    if not isinstance(name, str) or name not in named:
        raise expected(f"the name of one of the tools ({', '.join(named) or 'there are none'})", name, field)
    return name


def _json_object(text: str) -> JSON | None:
    """The object that a text is the JSON of; None where it is none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _logit_bias(given: Mapping[str, float]) -> Mapping[str, float]:
    """By token id as text, as JSON has it."""
    if len(given) > MAX_BIASED:
        raise ApiError(f"logit_bias: expected at most {MAX_BIASED} tokens, got {len(given)}", param="logit_bias")
    for token in given:
        if not token.isdecimal() or not token.isascii() or len(token) > 10:
            raise expected("token ids as keys", token, "logit_bias")
    return {str(int(token)): bias for token, bias in given.items() if bias}
