"""Field validators: one function per kind of value, each of which returns the value or refuses it by name.

Used by every protocol's parser. A field that is missing or null has its default; a value of another kind is an ApiError
whose `param` is the field's path. `at` is the path of the object that holds the field ("messages[0]"), empty for the body
itself. Pure: knows no protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from agentlightning.prefill import PREFILL
from agentlightning.protocols.base import ApiError, short
from agentlightning.records import JSON, TEMPLATE_KWARGS

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1
"""Bound of whole numbers without a narrower one."""

MAX_CHOICES = 128

MAX_STOPS = 1024
"""Stop strings, and stop tokens: each token that is sampled is compared with all of them."""

MAX_TOP_LOGPROBS = 20
"""Alternatives that may be listed with a token: as many as vLLM gives where it is started without --max-logprobs."""


@dataclass(frozen=True, slots=True)
class UnsupportedParam:
    """A field that changes what is sampled: the kind of its value, and the values (beside null) with which it does not."""

    kind: type | tuple[type, ...]
    neutral: tuple[Any, ...] = ()


ENGINE_PARAMS: dict[str, UnsupportedParam] = {
    "top_a": UnsupportedParam(float, (0,)),
    "typical_p": UnsupportedParam(float, (1,)),
    "repeat_penalty": UnsupportedParam(float, (1,)),
    "length_penalty": UnsupportedParam(float, (1,)),
    "skip_special_tokens": UnsupportedParam(bool, (True,)),
    "bad_words": UnsupportedParam(list, ([],)),
    "logits_processors": UnsupportedParam(list, ([],)),
    "use_beam_search": UnsupportedParam(bool, (False,)),
    "truncate_prompt_tokens": UnsupportedParam(int),
    "add_special_tokens": UnsupportedParam(bool, (False,)),
    "logprob_token_ids": UnsupportedParam(list, ([],)),
    "prompt_embeds": UnsupportedParam((str, list), ("", [])),
    "kv_transfer_params": UnsupportedParam(dict, ({},)),
    "ec_transfer_params": UnsupportedParam(dict, ({},)),
    "mm_processor_kwargs": UnsupportedParam(dict, ({},)),
    "vllm_xargs": UnsupportedParam(dict, ({},)),
    "repetition_detection": UnsupportedParam(dict, ({},)),
    "thinking_token_budget": UnsupportedParam(int, (-1,)),
    "watermarking": UnsupportedParam(bool, (False,)),
    "stop_regex": UnsupportedParam((str, list), ("", [])),
    "lora_path": UnsupportedParam((str, list), ("", [])),
    "top_n_sigma": UnsupportedParam(float, (0, -1)),
    "mirostat": UnsupportedParam(int, (0,)),
    "dynatemp_range": UnsupportedParam(float, (0,)),
    "xtc_probability": UnsupportedParam(float, (0,)),
    "dry_multiplier": UnsupportedParam(float, (0,)),
}
"""Sampling fields that the OpenAI APIs and the engines behind them (vLLM, SGLang, llama.cpp) take in common and that nobody
accounts for; those that are honoured are read by decoding.py."""

CHOICE_PARAMS: dict[str, UnsupportedParam] = {
    "n": UnsupportedParam(int, (1,)),
    "best_of": UnsupportedParam(int, (1,)),
    "logprobs": UnsupportedParam((bool, int), (False,)),
    "response_format": UnsupportedParam(dict, ({}, {"type": "text"})),
}
"""Fields of Chat Completions and Completions: for the protocols that say these things otherwise, or not at all."""

SAMPLING_PARAMS: dict[str, UnsupportedParam] = {
    **CHOICE_PARAMS,
    "top_logprobs": UnsupportedParam(int, (0,)),
    "presence_penalty": UnsupportedParam(float, (0,)),
    "frequency_penalty": UnsupportedParam(float, (0,)),
    "repetition_penalty": UnsupportedParam(float, (1,)),
    "min_p": UnsupportedParam(float, (0,)),
    "logit_bias": UnsupportedParam(dict, ({},)),
    "seed": UnsupportedParam(int),
    "stop": UnsupportedParam((str, list), ("", [])),
    "include_stop_str_in_output": UnsupportedParam(bool, (False,)),
    "min_tokens": UnsupportedParam(int, (0,)),
    "ignore_eos": UnsupportedParam(bool, (False,)),
    "allowed_token_ids": UnsupportedParam(list, ([],)),
    "structured_outputs": UnsupportedParam(dict, ({},)),
}
"""Fields that are honoured elsewhere: for a protocol that has no place for them."""

ENGINE_REFUSED: dict[str, tuple[type, tuple[Any, ...], str]] = {
    "request_id": (str, (), "the id of a response is that of its recorded call; leave it out"),
    "return_prompt_text": (bool, (False,), "the response has no prompt_text; ask for return_token_ids"),
    "return_hidden_states": (bool, (False,), "hidden states are not kept; leave it out"),
    "separate_reasoning": (bool, (True,), "reasoning stands apart from the text; leave it out"),
    "no_stop_trim": (bool, (False,), "a stop string is cut off; ask for include_stop_str_in_output"),
    "prompt_token_ids": (list, ([],), "ids are read at /v1/tokens/generate, or as the prompt of Completions"),
}
"""Fields of vLLM and SGLang that no setting makes the gateway serve: kind, neutral values, why."""

ENGINE_WITHOUT_EFFECT: dict[str, type] = {
    "priority": int,
    "cache_salt": str,
    "session_id": str,
    "spaces_between_special_tokens": bool,
    "stream_interval": int,
    "truncation_side": str,
    "media_io_kwargs": dict,
}
"""Fields of vLLM that change when and how a completion is served, and not the completion; they are recorded."""

TOKEN_PARAMS: dict[str, UnsupportedParam] = {
    "return_token_ids": UnsupportedParam(bool, (False,)),
    "return_tokens_as_token_ids": UnsupportedParam(bool, (False,)),
    "prompt_logprobs": UnsupportedParam(int),
    "stop_token_ids": UnsupportedParam(list, ([],)),
}
"""Fields in which vLLM's clients speak of ids: for the protocols that have no place for them."""

RESERVED_VARIABLES = frozenset({
    "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
    "tokenizer_kwargs", "bos_token", "eos_token", "pad_token", "unk_token",
})  # fmt: skip
"""Names in `chat_template_kwargs` that are no settings of a template: its input, and options of transformers' function."""

NAMES: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
}


# --- one value --------------------------------------------------------------------------------------------------------


def text(data: JSON, name: str, at: str = "") -> str:
    """A string."""
    return _of_kind(data, name, str, at) or ""


def optional_text(data: JSON, name: str, at: str = "") -> str | None:
    """A string, or None where it is missing or null."""
    return _of_kind(data, name, str, at)


def boolean(data: JSON, name: str, default: bool = False, at: str = "") -> bool:
    """True or false."""
    value = _of_kind(data, name, bool, at)
    return default if value is None else value


def whole(data: JSON, name: str, low: int = 0, high: int = MAX_INTEGER, at: str = "") -> int | None:
    """A whole number from `low` to `high`, or None."""
    value = data.get(name)
    if value is None:
        return None
    if not is_kind(value, int) or not low <= value <= high:
        raise expected(f"a whole number {_range(low, high)}", value, name, at)
    return int(value)


def alternatives(data: JSON, name: str) -> int | None:
    """A number of alternatives to list with each token, or None. vLLM's -1, the whole vocabulary, is refused."""
    if data.get(name) == -1:
        why = "-1 asks for the whole vocabulary with every token"
        raise refused(name, f"{why}; expected a whole number from 0 to {MAX_TOP_LOGPROBS}")
    return whole(data, name, 0, MAX_TOP_LOGPROBS)


def number(data: JSON, name: str, low: float, high: float, at: str = "") -> float | None:
    """A number from `low` to `high`, or None."""
    value = data.get(name)
    if value is None:
        return None
    if not is_kind(value, float) or not low <= value <= high:
        raise expected(f"a number from {low:g} to {high:g}", value, name, at)
    return float(value)


def record(data: JSON, name: str, at: str = "") -> JSON | None:
    """An object, or None."""
    return _of_kind(data, name, dict, at)


def items(data: JSON, name: str, at: str = "") -> list[Any]:
    """A list, empty where it is missing."""
    return _of_kind(data, name, list, at) or []


def _of_kind(data: JSON, name: str, kind: type[T], at: str) -> T | None:
    check_kind(data, name, kind, at)
    value: T | None = data.get(name)
    return value


# --- several values ---------------------------------------------------------------------------------------------------


def stops(data: JSON, name: str = "stop") -> tuple[str, ...]:
    """Stop strings, from one string or a list of them; none may be empty."""
    value = data.get(name)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise expected("a string or a list of strings, none empty", value, name)
    return tuple(bounded(values, name, MAX_STOPS))


def token_ids(data: JSON, name: str) -> list[int]:
    """A list of token ids, empty where it is missing."""
    ids = items(data, name)
    if not all(is_kind(one, int) and 0 <= one < 2**31 for one in ids):
        raise expected("a list of token ids", ids, name)
    return ids


def stop_token_ids(data: JSON) -> tuple[int, ...]:
    """Token ids after which a completion ends."""
    ids = token_ids(data, "stop_token_ids")
    return tuple(bounded(ids, "stop_token_ids", MAX_STOPS))


def bounded(values: list[Any], name: str, most: int, at: str = "") -> list[Any]:
    """The list itself, if it has at most so many members."""
    if len(values) > most:
        raise expected(f"at most {most} members", len(values), name, at)
    return values


def forced(data: JSON, hottest: float = 2) -> JSON:
    """`temperature` and `top_p` as given: in range, and overridden by the rollout's own."""
    given = {"temperature": number(data, "temperature", 0, hottest), "top_p": number(data, "top_p", 0, 1)}
    return {name: data[name] for name, value in given.items() if value is not None}


def token_options(data: JSON, streamed: bool) -> dict[str, Any]:
    """The fields of a CompletionRequest that ask for ids, and for log-probabilities of the prompt, as vLLM takes them."""
    check_kind(data, "return_token_ids", bool)
    prompt_logprobs = alternatives(data, "prompt_logprobs")
    if prompt_logprobs is not None and streamed:
        raise ApiError(
            'prompt_logprobs: not available where "stream" is true, as with vLLM; ask for them without streaming',
            param="prompt_logprobs",
        )
    return {
        "return_token_ids": data.get("return_token_ids"),
        "tokens_as_ids": boolean(data, "return_tokens_as_token_ids"),
        "prompt_logprobs": prompt_logprobs,
    }


def template_kwargs(data: JSON) -> JSON:
    """The variables that a request gives to the model's chat template, by name."""
    return record(data, TEMPLATE_KWARGS) or {}


def reserved_variables(data: JSON) -> dict[str, str]:
    """Those of `chat_template_kwargs` that are refused, with the reason."""
    return {
        f"{TEMPLATE_KWARGS}.{name}": "not a variable that a request may give to the chat template; leave it out"
        for name in template_kwargs(data)
        if name in RESERVED_VARIABLES
    }


def engine_refused(data: JSON) -> dict[str, str]:
    """The fields of ENGINE_REFUSED that a request has, with the reason why they are refused."""
    found = {}
    for name, (kind, neutral, why) in ENGINE_REFUSED.items():
        check_kind(data, name, kind)
        if data.get(name) is not None and data[name] not in neutral:
            found[name] = why
    return found


def unsupported(data: JSON, params: Mapping[str, UnsupportedParam]) -> JSON:
    """The fields of `params` whose values would change what is sampled, as the agent gave them."""
    result: JSON = {}
    for name in sorted(params.keys() & data.keys()):
        check_kind(data, name, params[name].kind)
        if data[name] is not None and not _among(data[name], params[name].neutral):
            result[name] = data[name]
    return result


def json_object(text: str) -> JSON | None:
    """The object that a text is the JSON of; None where it is none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def not_applied(data: JSON, kinds: Mapping[str, type | tuple[type, ...]], at: str = "") -> JSON:
    """The fields of `kinds`, by path, that ask for what no trained policy has a setting for."""
    for name in kinds:
        check_kind(data, name, kinds[name], at)
    return {f"{at}.{name}" if at else name: data[name] for name in kinds if data.get(name) is not None}


def given(data: JSON, names: Iterable[str], neutral: Sequence[Any] = (None, False, [], {})) -> JSON:
    """The fields among `names` with a value that is not neutral."""
    return {name: data[name] for name in names if name in data and not _among(data[name], neutral)}


def services(data: JSON, names: Iterable[str]) -> dict[str, str]:
    """The fields among `names` that a provider's service would have to serve, with the reason why they are refused."""
    return {
        name: f"{short(value)} is not supported by the trained policy; leave it out"
        for name, value in given(data, names, neutral=(None, False, "", [], {})).items()
    }


def user_message(data: JSON, name: str) -> JSON:
    """A field of any kind as the message of a user, for the record: text as it is, all else as JSON."""
    value = data.get(name)
    return {"role": "user", "content": value if isinstance(value, str) else orjson.dumps(value).decode()}


def check_kinds(data: JSON, kinds: Mapping[str, type | tuple[type, ...]]) -> None:
    """Refuse the fields of `kinds` that hold another kind of value; for those that are accepted and have no effect."""
    for name in kinds.keys() & data.keys():
        check_kind(data, name, kinds[name])


def check_kind(data: JSON, name: str, kind: type | tuple[type, ...], at: str = "") -> None:
    """Refuse a field that is neither missing, nor null, nor of `kind`."""
    value = data.get(name)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is not None and not any(is_kind(value, one) for one in kinds):
        raise expected(" or ".join(NAMES[one] for one in kinds), value, name, at)


def tools(data: JSON) -> tuple[list[JSON] | None, JSON]:
    """Function tools in the form of Chat Completions (None where there are none), and the tools that are no functions, by
    path."""
    functions, others = split_tools(data)
    for where, tool in functions.items():
        function = record(tool, "function", where)
        if function is None:
            raise expected('{"type": "function", "function": {"name": …}}', tool, where)
        check_function(function, f"{where}.function")
    return list(functions.values()) or None, others


def split_tools(data: JSON) -> tuple[dict[str, JSON], JSON]:
    """Function tools and the others, which no policy can be trained to use: they are run by a provider. By path."""
    functions: dict[str, JSON] = {}
    others: JSON = {}
    for index, tool in enumerate(items(data, "tools")):
        where = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise expected('{"type": "function", …}', tool, where)
        (functions if kind == "function" else others)[where] = tool
    return functions, others


def check_function(function: JSON, at: str) -> None:
    """Refuse the definition of a function that has no name, or fields of another kind.

    With `strict` its calls are sampled under a grammar; see decoding.py.
    """
    if not text(function, "name", at=at):
        raise expected("the name of a function", function.get("name"), "name", at)
    check_kind(function, "description", str, at)
    check_kind(function, "parameters", dict, at)
    check_kind(function, "strict", bool, at)


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


# --- refusals ---------------------------------------------------------------------------------------------------------


def expected(what: str, value: Any, name: str, at: str = "") -> ApiError:
    """The refusal of a value that is not what was expected."""
    path = f"{at}.{name}" if at else name
    return ApiError(f"{path}: expected {what}, got {short(value)}", param=path)


def refused(path: str, why: str) -> ApiError:
    """The refusal of a value that the trained policy does not serve."""
    return ApiError(f"{path}: {why}", param=path, code="unsupported_value")


def not_text(part: Any, path: str) -> ApiError:
    """The refusal of a part that is no text."""
    return refused(path, f"expected a text or an image part, all that the trained policy reads here, got {short(part)}")


def is_kind(value: Any, kind: type) -> bool:
    """True where a JSON value is of a kind; a whole number is a number, and true is neither.

    >>> is_kind(1, float), is_kind(True, int), is_kind(True, bool)
    (True, False, True)
    """
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _range(low: int, high: int) -> str:
    return f"of at least {low}" if high == MAX_INTEGER else f"from {low} to {high}"


def _among(value: Any, neutral: Sequence[Any]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
