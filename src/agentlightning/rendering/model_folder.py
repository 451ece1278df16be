"""A model's folder: its settings, its special tokens, the tokens that end a completion, and the bytes of tokens.

Renderer, sampler and learner read them here, so that they agree, with vLLM too, on what ends a completion and by which token
one ends that follows a grammar. Refuses to know weights and templates.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agentlightning.errors import ModelError
from agentlightning.records import JSON

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RENDERING = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files in a model's folder that are neither weights nor code."""


def read_json(path: Path) -> JSON:
    """The object in a file; {} where there is none. Raises ModelError where it is not JSON."""
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as cause:
        raise ModelError(f"{path}: not valid JSON: {cause}") from cause
    return value if isinstance(value, dict) else {}


def rendering_files(folder: Path) -> dict[str, bytes]:
    """Reads what a renderer of the model needs of its folder, by name: settings, tokenizer, chat template, processor."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in RENDERING and not path.name.endswith(".index.json")
    }


def special_tokens(settings: JSON) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, as templates know them."""
    tokens: dict[str, Any] = {name: settings.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token}


def end_ids(folder: Path, tokenizer: Tokenizer | None = None) -> list[int]:
    """Ids that end a completion. The first is the one that ends it under a grammar: the tokenizer's `eos_token`, as in
    vLLM; the others are those of generation_config.json, or of config.json. Without `tokenizer` it is the folder's."""
    config = read_json(folder / "config.json")
    holders = [read_json(folder / "generation_config.json"), config, config.get("text_config") or {}]
    found: Any = next((one["eos_token_id"] for one in holders if one.get("eos_token_id") is not None), [])
    if tokenizer is None and (file := folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    eos = special_tokens(read_json(folder / "tokenizer_config.json")).get("eos_token")
    own = None if tokenizer is None or eos is None else tokenizer.token_to_id(eos)
    ids: list[int] = found if isinstance(found, list) else [found]
    return ids if own is None else [own, *(one for one in ids if one != own)]


PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHERS = [byte for byte in range(0x100) if byte not in PRINTABLE]
ALPHABET = {chr(byte): byte for byte in PRINTABLE} | {chr(0x100 + at): byte for at, byte in enumerate(OTHERS)}
"""Bytes by the characters in which byte-level vocabularies write them, as GPT-2's does."""


def token_bytes(text: str, piece: str) -> bytes:
    r"""The bytes of the token that decodes to `text` and that its vocabulary writes as `piece`.

    >>> token_bytes("é", "Ã©"), token_bytes("\ufffd", "Ã"), token_bytes("\ufffd", "<0xC3>")
    (b'\xc3\xa9', b'\xc3', b'\xc3')
    """
    if "\N{REPLACEMENT CHARACTER}" in text:
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        if all(char in ALPHABET for char in piece):
            return bytes(ALPHABET[char] for char in piece)
    return text.encode()
