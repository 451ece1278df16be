"""Engine faces: the two HTTP forms in which an engine takes token ids and gives token ids back.

    generate      POST /inference/v1/generate   vLLM (--enable-scale-out), our sampler: a version for each range of tokens
    completions   POST /v1/completions          vLLM and others with return_token_ids: one version a call

Driven by upstreams.py, which writes every request in the first form. Pure: knows nothing of connections and policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.errors import EngineError
from agentlightning.types import JSON, VersionSpan

Face = Literal["generate", "completions"]

PATHS: dict[Face, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}


@dataclass(slots=True)
class Sampled:
    """What an engine sampled, whole or so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    versions: list[VersionSpan] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """Alternatives for each token, (id, logprob), where the engine gave some: in any order, the token itself among them."""

    def add(self, data: Any, face: Face, version: int) -> list[int]:
        """Take in one response or chunk; returns its ids. `version` is stamped where the engine stamps none.

        Raises EngineError where it is not of the expected shape.
        """
        try:
            choice = data["choices"][0]
            ids: list[int] = choice["token_ids"] or []
            if ids:
                self.ids += ids
                if face == "generate":
                    self._read_content(choice["logprobs"]["content"])
                else:
                    self._read_lists(choice["logprobs"])
            spans = choice.get("weight_versions")
            if spans:
                self.versions = [
                    VersionSpan(version=_version(span["version"], version), start=span["start"], end=span["end"])
                    for span in spans
                ]
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
                self.stop_reason = choice.get("stop_reason")
        except (KeyError, IndexError, TypeError, ValueError) as cause:
            raise EngineError(f"the engine answered in an unknown form: {type(cause).__name__}: {cause}") from cause
        if len(self.ids) != len(self.logprobs):
            raise EngineError(f"the engine gave {len(self.logprobs)} logprobs for {len(self.ids)} sampled ids")
        if self.finish_reason is not None and self.ids and not self.versions:
            self.versions = [VersionSpan(version=version, start=0, end=len(self.ids))]
        return ids

    def _read_content(self, content: list[JSON]) -> None:
        self.logprobs += [one["logprob"] for one in content]
        if content and content[0].get("top_logprobs"):
            self.top += [[(_id(one), one["logprob"]) for one in token["top_logprobs"]] for token in content]

    def _read_lists(self, logprobs: JSON) -> None:
        self.logprobs += logprobs["token_logprobs"]
        if any(logprobs.get("top_logprobs") or ()):
            self.top += [[(_named_id(name), value) for name, value in one.items()] for one in logprobs["top_logprobs"]]


def body(request: JSON, face: Face, model: str) -> JSON:
    """The body for a request in the form of generate; `model` is the name that the engine serves."""
    if face == "generate":
        return {**request, "model": model}
    return {
        "model": model,
        "prompt": request["token_ids"],
        "stream": request["stream"],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **{name: value for name, value in request["sampling_params"].items() if value not in ([], None)},
    }


def _version(label: str, version: int) -> int:
    """The version behind an engine's label; where nobody has told it one, `version`.

    >>> _version("7", 3), _version("default", 3)
    (7, 3)
    """
    return int(label) if label.isdigit() else version


def _id(alternative: JSON) -> int:
    """The id of an alternative, which vLLM names ``token_id:17`` where it has no field for it."""
    found = alternative.get("token_id")
    return int(found) if found is not None else _named_id(alternative["token"])


def _named_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
