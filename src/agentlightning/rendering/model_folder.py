"""A model's folder: its tokenizer with its settings, its chat templates, the tokens that end a completion, and the bytes of
tokens.

Renderer, sampler and learner read them here, so that they agree, with transformers and vLLM too, on what a prompt is, what
ends a completion and by which token one ends that follows a grammar. What a folder lacks is a ModelError that names it.
Refuses to know weights, and what templates write.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import orjson

from agentlightning.errors import ModelError
from agentlightning.records import JSON

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates, as transformers writes it; also what their files' names begin with where all files of a
model are in one folder."""
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "chatml": "{% for message in messages %}"
        "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ eos_token ~ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    }
)
"""Chat templates by name, for models that have none. A message ends with the model's own end token, whatever its vocabulary:
nothing else ends a completion."""
RENDERING = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files in a model's folder that are neither weights nor code."""


def read_json(path: Path) -> JSON:
    """The object in a file; {} where there is none. Raises ModelError where it is not JSON."""
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as cause:
        raise ModelError(f"{path}: not valid JSON: {cause}") from cause
    return value if isinstance(value, dict) else {}


def rendering_files(folder: Path) -> dict[str, bytes]:
    """Reads what a renderer of the model needs of its folder, by name: settings, tokenizer, chat template, processor."""
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in RENDERING and not path.name.endswith(".index.json")
    }
    further = sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))
    return files | {f"{CHAT_TEMPLATES}.{path.name}": path.read_bytes() for path in further}


def tokenizer_settings(folder: Path) -> JSON:
    """tokenizer_config.json with the special tokens that older folders keep in a file of their own."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
    further = settings.get("extra_special_tokens")
    return settings | (further if isinstance(further, dict) else {})


def special_tokens(settings: JSON) -> dict[str, str]:
    """The special tokens that a tokenizer's settings name, as templates know them."""
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def chat_templates(folder: Path, settings: JSON, tokenizer: Tokenizer, given: str | None = None) -> dict[str, str]:
    """Chat templates by name: the one `given` (`model.chat_template`: the name of a built-in one, or a file), else those of
    the folder, whose files take precedence over its settings. ModelError where there is no default."""
    if given is not None and given in BUILT_IN:
        before = "".join(tokenizer.encode("").tokens)  # a base model's <bos>
        return {"default": "{{ " + json.dumps(before) + " }}" + BUILT_IN[given]}
    if given is not None:
        try:
            return {"default": Path(given).expanduser().read_text(encoding="utf-8-sig")}
        except (OSError, UnicodeDecodeError) as cause:
            raise ModelError(
                f"model.chat_template: expected {' or '.join(BUILT_IN)} or a file, got {given!r}, which cannot be read: "
                f"{getattr(cause, 'strerror', None) or cause}"
            ) from cause
    found = _folder_templates(folder, settings)
    if not found:
        raise ModelError(
            f"{folder}: its tokenizer has no chat template, so that messages cannot be rendered: put a chat_template.jinja "
            'into the folder, or take a built-in one with model.chat_template = "chatml" (--chat-template chatml)'
        )
    if "default" not in found:
        raise ModelError(f"{folder}: its chat templates are {', '.join(sorted(found))}; expected one named default")
    return found


def _folder_templates(folder: Path, settings: JSON) -> dict[str, str]:
    files = [*(folder / CHAT_TEMPLATES).glob("*.jinja"), *folder.glob(f"{CHAT_TEMPLATES}.*.jinja")]
    found = {file.name.removeprefix(f"{CHAT_TEMPLATES}.").removesuffix(".jinja"): file for file in files}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = folder / "chat_template.jinja"
    if found:
        return {name: file.read_text(encoding="utf-8-sig") for name, file in found.items()}
    given = settings.get("chat_template")
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {"default": given} if isinstance(given, str) and given else {}


def open_tokenizer(folder: Path, settings: JSON) -> Tokenizer:
    """The folder's tokenizer, with all tokens that its settings add. Raises ModelError."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as cause:  # the Rust side raises bare Exception
            raise ModelError(f"{file}: not a tokenizer: {cause}") from cause
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _add_tokens(tokenizer, folder, settings)
        return tokenizer
    from transformers import AutoTokenizer  # converts older tokenizers; slow to import, rarely needed

    try:
        converted: Tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except (OSError, ValueError, AttributeError) as cause:
        said = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise ModelError(f"{folder}: no tokenizer can be loaded from it: {said}") from cause
    return converted


def _add_tokens(tokenizer: Tokenizer, folder: Path, settings: JSON) -> None:
    """Add the tokens that tokenizer.json does not have, or has as plain ones, as transformers does."""
    from tokenizers import AddedToken

    named = special_tokens(settings).values()
    known = tokenizer.get_added_tokens_decoder()
    declared = {int(index): AddedToken(**given) for index, given in settings.get("added_tokens_decoder", {}).items()}
    if not declared:
        older = {text: index for text, index in read_json(folder / "added_tokens.json").items() if index not in known}
        declared = {
            index: AddedToken(text, special=text in named, normalized=text not in named)
            for text, index in older.items()
        }
    for index, token in sorted(declared.items()):
        if repr(known.get(index)) != repr(token):
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != index:
            raise ModelError(
                f"{folder}: the token {token.content!r} should have id {index} and has "
                f"{tokenizer.token_to_id(token.content)}: tokenizer.json and the tokens added to it do not fit together"
            )
    further = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
    texts = [one["content"] if isinstance(one, dict) else one for one in further] if isinstance(further, list) else []
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in (*named, *texts):
        if text not in added and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, special=True)])


def end_ids(folder: Path, tokenizer: Tokenizer | None = None) -> list[int]:
    """Ids that end a completion. The first is the one that ends it under a grammar: the tokenizer's `eos_token`, as in
    vLLM; the others are those of generation_config.json, or of config.json. Without `tokenizer` it is the folder's."""
    config = read_json(folder / "config.json")
    holders = [read_json(folder / "generation_config.json"), config, config.get("text_config") or {}]
    found: Any = next((one["eos_token_id"] for one in holders if one.get("eos_token_id") is not None), [])
    settings = tokenizer_settings(folder)
    if tokenizer is None and (folder / "tokenizer.json").is_file():
        tokenizer = open_tokenizer(folder, settings)
    eos = special_tokens(settings).get("eos_token")
    own = None if tokenizer is None or eos is None else tokenizer.token_to_id(eos)
    if tokenizer is not None and eos is not None and own is None:
        raise ModelError(f"{folder}: its eos_token {eos!r} is no token of its tokenizer")
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
