"""Questions and paragraphs without names: every name is shown as E0, E1, …, dates as D, numbers as N.

A tiny model cannot learn the words of a million names, and need not: it is shown "who directed E3 ?", searches for "E3" and
reads "E3 is a film by E7". Which name gets which number is drawn anew for each task: if they were numbered as they appear,
a plan that never reads ("E0, then E1 three times") would do well. Names are found by spelling alone, in text without a
capital letter by the titles of the corpus: nothing of the answer or of the gold paragraphs is used. For answers, dates and
numbers are numbered, too: D0, D1, …, N0, N1, …
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import lru_cache

MAX_NAMES = 24
"""Of a task; four searches show about twenty."""
SPANS = {"E": 40, "D": 12, "N": 12}
"""Of a task whose dates and numbers have names, too; what is beyond is the letter alone."""
SPAN_WORDS = 48
"""Words of a paragraph that are shown then: what is asked is seldom said in the first ones."""
OTHER = "E"
"""A name beyond `MAX_NAMES`."""
BLANK = "_"

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATE = (
    rf"\d{{1,2}} (?:{MONTHS}) \d{{4}}|(?:{MONTHS}) \d{{1,2}}, ?\d{{4}}|(?:{MONTHS}) \d{{4}}|\b1\d{{3}}\b|\b20[0-2]\d\b"
)
NUMBER = r"\d[\d,.]*\d|\d"
CAPITAL = r"A-ZÀ-ÖØ-ÞŁŠŽĐĆČŚİ"
SHORT = rf"(?!(?:{MONTHS}) \d)(?:(?:[A-Z]|Dr|Mr|Mrs|St|Jr|Sr)\.(?:[A-Z]\.)*"
"""A month before a number belongs to a date: "In May 1934"."""
LINK = r"(?:(?:of|the|de|la|von|van|del|di|du|le|der|da|&|al|in|for|to|on|at|with) ){0,2}"
WORD_OF_TITLE = rf"{SHORT}|[{CAPITAL}0-9][\w'’\-&]*)"
WORD_OF_NAME = rf"{SHORT}|[{CAPITAL}][\w'’\-&]*)"
IN_QUESTION = (
    rf"\"[^\"]{{2,60}}\"|{WORD_OF_TITLE}(?:(?:[ ]|[ ]?[:,!?&][ ](?=[A-Z0-9]))?{LINK}{WORD_OF_TITLE})*"
    r"(?:!|\?(?= or))?(?: ?\([^)]{2,50}\))?"
)
"""Titles of works are long, hold small words and numbers, and may end in a bracket: "Madam Satan (1930 film)"."""
IN_PARAGRAPH = rf"\"[^\"]{{2,60}}\"|{WORD_OF_NAME}(?: {LINK}{WORD_OF_NAME})*"
PIECES = {
    kind: re.compile(rf"(?P<date>{DATE})|(?P<name>{pattern})|(?P<number>{NUMBER})")
    for kind, pattern in {"question": IN_QUESTION, "paragraph": IN_PARAGRAPH}.items()
}
TOKEN = re.compile(r"\w+(?:['’]\w+)?|[^\s\w]")
LOWER_CASE = re.compile(rf"(?P<date>{DATE})|(?P<number>{NUMBER})|(?P<word>{TOKEN.pattern})", re.IGNORECASE)
MAX_TITLE_WORDS = 8
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "which what who whom whose when where are is was were do does did how in on at the a an of from for has have had "
        "both between if why to by name and that",
    )
)
NOT_NAMES = frozenset({"he", "she", "it", "his", "her", "they", "this", "film", "song"})
STARTS = frozenset({"the", "it", "he", "she", "in", "a", "an"})


class Names:
    """The names of one question and of the paragraphs that were read for it; the same name keeps its number."""

    def __init__(
        self,
        question: str,
        draw: int = 0,
        blanked: float = 0.0,
        words: int = 24,
        titles: frozenset[str] = frozenset(),
        spans: bool = False,
    ) -> None:
        """`draw` decides the numbers of names, and which share `blanked` of the words is hidden. A paragraph is cut after
        `words` words. titles: keys of the names in text without a capital letter. spans: dates and numbers have names."""
        self._question, self._blanked, self._words, self._titles = question, blanked, words, titles
        self._rng = random.Random(draw)
        most = SPANS if spans else {OTHER: MAX_NAMES}
        self._free = {letter: self._rng.sample(range(many), many) for letter, many in most.items()}
        self._number_of: dict[str, str] = {}
        self._name_of: dict[str, str] = {}

    def question(self) -> str:
        return " ".join(self._show(self._question, "question", 60))

    def paragraph(self, title: str, text: str) -> str:
        """ "E3 : E3 is a film by E7" """
        return " ".join([self._name(title), ":", *self._show(text, "paragraph", self._words)])

    def query(self, query: str) -> str | None:
        """The words behind a query of names ("E3" or "E3 E7"); None where one of them was not shown."""
        words = query.split()
        return " ".join(self._name_of[word] for word in words) if all(w in self._name_of for w in words) else None

    @property
    def shown(self) -> list[str]:
        """The names shown so far, as the model sees them, in the order of their appearance."""
        return list(self._name_of)

    def _show(self, text: str, kind: str, most: int) -> list[str]:
        shown = []
        for piece, content in pieces(text[:700], kind, self._titles)[
            :most
        ]:  # what is cut gets no number: it cannot be searched for
            if piece == "name":
                shown.append(self._name(content))
            elif piece == "word":
                shown.append(BLANK if content.isalpha() and self._rng.random() < self._blanked else content)
            else:
                shown.append(self._name(content, "D" if piece == "date" else "N"))
        return shown

    def _name(self, name: str, letter: str = OTHER) -> str:
        key = f"{letter} {name_key(name)}"
        if key not in self._number_of:
            if not self._free.get(letter):
                return letter
            self._number_of[key] = f"{letter}{self._free[letter].pop()}"
            self._name_of[self._number_of[key]] = name
        return self._number_of[key]


def name_key(name: str) -> str:
    """Returns the same text for each spelling of a name."""
    return " ".join(re.findall(r"\w+", name.lower()))


def title_keys(titles: Iterable[str]) -> frozenset[str]:
    """Returns the keys by which titles are found in text without a capital letter; a small word is none."""
    return frozenset(map(name_key, titles)) - FUNCTION_WORDS - NOT_NAMES - STARTS - {""}


@lru_cache(maxsize=4096)
def pieces(text: str, kind: str = "paragraph", titles: frozenset[str] = frozenset()) -> tuple[tuple[str, str], ...]:
    """The text as ("name" | "date" | "number" | "word", what it says); words are in lower case.

    titles: keys of the names in a text that has no capital letter.

    >>> pieces("Which film was made first, Annie Hall or Big?", "question")[4:]
    (('word', 'first'), ('word', ','), ('name', 'Annie Hall'), ('word', 'or'), ('name', 'Big'), ('word', '?'))
    """
    if titles and text.islower():
        return _lower_case_pieces(text, titles)
    found = []
    end = 0
    for match in PIECES[kind].finditer(text):
        found += [("word", word.lower()) for word in TOKEN.findall(text[end : match.start()])]
        end = match.end()
        piece = str(match.lastgroup)
        found += _name_pieces(match, kind) if piece == "name" else [(piece, match.group())]
    return (*found, *(("word", word.lower()) for word in TOKEN.findall(text[end:])))


def _lower_case_pieces(text: str, titles: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Names are the longest runs of words that are a title."""
    found = []
    starts, ends = zip(*(match.span() for match in re.finditer(r"\w+", text)), strict=True)
    at = 0
    while match := LOWER_CASE.search(text, at):
        start, at = match.span()
        piece = str(match.lastgroup)
        if start in starts:
            first = starts.index(start)
            for end in reversed(ends[first : first + MAX_TITLE_WORDS]):
                if name_key(text[start:end]) in titles:
                    piece, at = "name", end
                    break
        found.append((piece, text[start:at]))
    return tuple(found)


def _name_pieces(match: re.Match[str], kind: str) -> list[tuple[str, str]]:
    """A run of capitalised words without the function words that only start its sentence."""
    words = match.group().split(" ")
    found = []
    first_of_question = kind == "question" and match.start() == 0
    while words and (start := words[0].lower()) in FUNCTION_WORDS:
        sentence_start = start not in ("the", "a") if first_of_question else kind == "paragraph" and start in STARTS
        if not (len(words) == 1 or sentence_start):
            break
        found.append(("word", start))
        words = words[1:]
    name = " ".join(words)
    if not name:
        return found
    if len(words) == 1 and name.lower() in NOT_NAMES:
        return [*found, ("word", name.lower())]
    abbreviated = name.endswith(".") and len(words) > 1
    name = name.strip('"').rstrip("?" if abbreviated else ".,?")
    return [*found, ("name", name)] if name else found
