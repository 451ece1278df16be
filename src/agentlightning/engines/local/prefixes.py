"""Keys and values of finished completions, kept so that the next turn of a conversation prefills only what is new.

The scheduler drives it. An entry is found by its exact ids, so that a hit is never wrong; the caller clears the cache when
weights change. Refuses to know what an entry holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

ID_BYTES = 4


class PrefixCache:
    """Entries by the token ids they stand for (int32 bytes), least recently used first out, at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def put(self, ids: bytes, cached: Any, size: int) -> None:
        if size > self._limit or ids in self._entries:
            return
        self._entries[ids] = (cached, size)
        self._lengths[len(ids)] += 1
        self._used += size
        while self._used > self._limit:
            oldest, (_, freed) = self._entries.popitem(last=False)
            self._used -= freed
            self._lengths[len(oldest)] -= 1
            if not self._lengths[len(oldest)]:
                del self._lengths[len(oldest)]

    def longest(self, ids: bytes) -> tuple[int, Any]:
        """(tokens, what was kept) of the longest entry that `ids` goes on from; (0, None) without one.

        The last id is never taken from the cache: its logits are needed.
        """
        for length in sorted(self._lengths, reverse=True):
            if length < len(ids) and ids[:length] in self._entries:
                self._entries.move_to_end(ids[:length])
                return length // ID_BYTES, self._entries[ids[:length]][0]
        return 0, None

    def clear(self) -> None:
        self._entries.clear()
        self._lengths.clear()
        self._used = 0
