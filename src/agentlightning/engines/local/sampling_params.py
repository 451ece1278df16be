"""Reads the sampling parameters of a request to the sampler: vLLM's names, each checked. Pure.

InputError names the field that is wrong, and what was expected.
"""

from __future__ import annotations

from typing import Any

from agentlightning.errors import InputError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "bad_words": (None, []),
}
"""Sampling parameters of vLLM that are served only with the values that change nothing."""
ABOUT_TEXT = frozenset(
    {"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind"}
)
CONSTRAINTS = frozenset(
    {
        "structured_outputs",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "top_k",
        "min_p",
        "min_tokens",
        "allowed_token_ids",
    }
)
"""Parameters that change the distribution that tokens are drawn from, beside temperature and top_p; see decoding.py."""
KNOWN = CONSTRAINTS | frozenset(
    {
        "temperature",
        "top_p",
        "max_tokens",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
    }
)
MAX_LOGPROBS = 20


def check_names(sampling: dict[str, Any]) -> None:
    """Refuse parameters that the local engine does not know, or serves with one value only."""
    for name, value in sampling.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise InputError(f"sampling_params.{name} is {value!r}; the local engine serves only {NEUTRAL[name][0]!r}")
        if name not in KNOWN and name not in NEUTRAL and name not in ABOUT_TEXT:
            raise InputError(f"sampling_params.{name} is not known to the local engine")


def read_seed(sampling: dict[str, Any]) -> int | None:
    """The seed of the noise, where one is given."""
    seed = sampling.get("seed")
    if not (seed is None or (isinstance(seed, int) and not isinstance(seed, bool))):
        raise InputError(f"sampling_params.seed must be a whole number, not {seed!r}")
    return seed


def read_stops(sampling: dict[str, Any]) -> tuple[str, ...]:
    """Texts that end a completion."""
    stops = sampling.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError("sampling_params.stop must be a string or a list of strings, none of them empty")
    return tuple(stops)


def read_stop_ids(sampling: dict[str, Any]) -> frozenset[int]:
    """Tokens that end a completion, beside the model's own."""
    ids = sampling.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise InputError("sampling_params.stop_token_ids must be a list of token ids")
    return frozenset(ids)


def number(
    given: dict[str, Any], name: str, default: float, low: float, high: float, above: bool = False, whole: bool = False
) -> float:
    """A parameter from `low` (above it, where `above`) to `high`; `default` where it is missing."""
    value = given.get(name)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    right = isinstance(value, kinds) and not isinstance(value, bool)
    if not right or not (low < value if above else low <= value) or value > high or value == float("inf"):
        expected = f"{'a whole number' if whole else 'a number'} {'above' if above else 'of at least'} {low:g}"
        raise InputError(
            f"sampling_params.{name} is {value!r}; expected {expected}" + (f", at most {high:g}" if high < 2 else "")
        )
    return float(value)


def read_logits(sampling: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Penalties, logit_bias and cuts, without those that are neutral."""
    found: dict[str, Any] = {
        "presence_penalty": number(sampling, "presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": number(sampling, "frequency_penalty", 0.0, -2.0, 2.0),
        "repetition_penalty": number(sampling, "repetition_penalty", 1.0, 0.0, float("inf"), above=True),
        "min_p": number(sampling, "min_p", 0.0, 0.0, 1.0),
        "top_k": int(number(sampling, "top_k", 0, -1, float("inf"), whole=True)),
        "min_tokens": int(number(sampling, "min_tokens", 0, 0, float("inf"), whole=True)),
        "allowed_token_ids": _allowed_ids(sampling, vocab),
    }
    bias = sampling.get("logit_bias") or {}
    known = isinstance(bias, dict) and all(
        str(token).isdecimal() and int(token) < vocab and isinstance(value, int | float)
        for token, value in bias.items()
    )
    if not known:
        raise InputError(f"sampling_params.logit_bias must map token ids from 0 to {vocab - 1} to numbers")
    neutral = {"repetition_penalty": 1.0, "top_k": -1}
    found = {name: value for name, value in found.items() if value and value != neutral.get(name)}
    if "min_tokens" in found:
        found["stop_token_ids"] = sampling.get("stop_token_ids") or []
    return {**found, **({"logit_bias": bias} if bias else {})}


def _allowed_ids(sampling: dict[str, Any], vocab: int) -> list[int]:
    given = sampling.get("allowed_token_ids") or []
    if not isinstance(given, list) or not all(isinstance(one, int) and 0 <= one < vocab for one in given):
        raise InputError(f"sampling_params.allowed_token_ids must be a list of token ids from 0 to {vocab - 1}")
    return given
