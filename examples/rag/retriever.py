"""Search over the paragraphs: BM25 (bm25s), a title counts three times; each search shows the best paragraph not yet shown.

A search costs 0.1 ms; building the index over 18,982 paragraphs takes a second, once a process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import bm25s
import numpy as np
from data import Paragraph, corpus
from names import title_keys

TITLE_COUNTS = 3
MAX_RESULTS = 10


class Retriever:
    """An index that answers a query with the numbers of the best paragraphs, best first."""

    def __init__(self, paragraphs: Sequence[Paragraph]) -> None:
        self.paragraphs = paragraphs
        self.titles = title_keys(paragraph.title for paragraph in paragraphs)
        self._vocabulary: dict[str, int] = {}
        self._index = bm25s.BM25(k1=1.2, b=0.75)
        texts = [_words(p.title) * TITLE_COUNTS + _words(p.text) for p in paragraphs]
        ids = [[self._vocabulary.setdefault(word, len(self._vocabulary)) for word in text] for text in texts]
        self._index.index((ids, self._vocabulary), show_progress=False)
        self._ranked: dict[str, list[int]] = {}  # agents of a group ask the same; some thousand different ones in a run

    def ranked(self, query: str) -> list[int]:
        """At most `MAX_RESULTS` numbers of paragraphs that share a word with the query."""
        known = self._ranked.get(query)
        if known is None:
            ids = [self._vocabulary[word] for word in _words(query) if word in self._vocabulary]
            known = self._ranked[query] = self._best(ids) if ids else []
        return known

    def _best(self, ids: list[int]) -> list[int]:
        scores = self._index.get_scores_from_ids(ids)
        most = min(MAX_RESULTS, len(scores))
        best = np.argpartition(-scores, most - 1)[:most]
        return [int(i) for i in best[np.argsort(-scores[best], kind="stable")] if scores[i] > 0]


@dataclass
class Session:
    """The searches of one question."""

    retriever: Retriever
    shown: list[int] = field(default_factory=list)

    def search(self, query: str) -> Paragraph | None:
        """The best paragraph that was not shown yet; None where there is none."""
        number = next((n for n in self.retriever.ranked(query) if n not in self.shown), None)
        if number is None:
            return None
        self.shown.append(number)
        return self.retriever.paragraphs[number]

    @property
    def found(self) -> set[str]:
        """Ids of the paragraphs shown."""
        return {self.retriever.paragraphs[number].id for number in self.shown}


@lru_cache(maxsize=2)
def retriever(file: str | None = None) -> Retriever:
    """The index over the whole corpus, built at the first call. file: a corpus of your own, as `warm_start.py` writes it."""
    return Retriever(corpus(file))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
