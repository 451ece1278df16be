"""Token bytes: what a token holds that is a part of a character, and so has no text of its own. Pure; knows no tokenizer."""

from __future__ import annotations

import re

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
