"""Multi-hop questions and the paragraphs to search: 2WikiMultihopQA, HotpotQA, MuSiQue.

Ho et al. 2020; Yang et al. 2018; Trivedi et al. 2022. They are read from $AGL_DATA/multihop, else from the Hugging Face
hub (`pip install datasets`), where the corpus is all paragraphs of the questions that are used. Questions of your own come
from a file (`read_own`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SETS = ("2wiki", "hotpotqa", "musique")
HUB = {
    "2wiki": ("framolfese/2WikiMultihopQA", None),
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor"),
    "musique": ("dgslibisey/MuSiQue", None),
}
HUB_QUESTIONS = {"train": 500, "dev": 300}
"""The first so many of each set: the corpus holds ten to twenty paragraphs for each."""
HELD_OUT = 51
"""Of 256: a fifth of a file of your own."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    question: str
    answer: str
    aliases: list[str]
    supporting: list[str]
    """Ids of the gold paragraphs. The agent never sees them: the reward is computed with them."""
    corpus: str | None = None
    """File of the paragraphs to search; None: those of the three sets."""

    def row(self, draw: int = 0, blanked: float = 0.0) -> dict[str, Any]:
        """Returns the agent's task; `draw` and `blanked` are for the tiny model (`names.Names`)."""
        return {**asdict(self), "draw": draw, "blanked": blanked}


def train(
    seed: int = 0, epochs: int = 4, blanked: float = 0.1, sets: Iterable[str] = ("2wiki",)
) -> list[dict[str, Any]]:
    """Training rows of some epochs, each with other numbers for its names and other words hidden."""
    return training_rows([question for name in sets for question in load(name, "train")], seed, epochs, blanked)


def training_rows(questions: list[Question], seed: int, epochs: int = 4, blanked: float = 0.1) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        question.row(rng.randrange(2**31), blanked)
        for _ in range(epochs)
        for question in rng.sample(questions, len(questions))
    ]


def train_spans(seed: int = 0) -> list[dict[str, Any]]:
    """Training rows of all three sets whose answer may be a span: not yes or no."""
    return training_rows(span_questions(), seed)


def span_questions() -> list[Question]:
    questions = [question for name in SETS for question in load(name, "train")]
    return [question for question in questions if question.answer.lower() not in ("yes", "no")]


def train_all(seed: int = 0) -> list[dict[str, Any]]:
    """Training rows of all three sets, as they are."""
    return train(seed, 1, 0.0, SETS)


def dev_2wiki() -> list[dict[str, Any]]:
    return dev("2wiki")


def dev_hotpotqa() -> list[dict[str, Any]]:
    return dev("hotpotqa")


def dev_musique() -> list[dict[str, Any]]:
    return dev("musique")


def dev_both() -> list[dict[str, Any]]:
    """Held-out rows of MuSiQue and 2Wiki, each with its `set`; the first ones are a sample of both."""
    rows = [row | {"set": name} for name in ("musique", "2wiki") for row in dev(name)]
    return random.Random(0).sample(rows, len(rows))


def dev(name: str) -> list[dict[str, Any]]:
    """Held-out rows, in a fixed order, with all their words."""
    return heldout_rows(load(name, "dev"))


def heldout_rows(questions: list[Question]) -> list[dict[str, Any]]:
    return [question.row(draw) for draw, question in enumerate(questions)]


def read_own(file: Path, corpus_file: Path) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions (a fifth) of a JSONL file of yours; their paragraphs are written to `corpus_file`.

    A row is {"question", "answer", "aliases" (may be left out), "paragraphs": [{"title", "text"}, …], "supporting": [titles
    of the gold paragraphs]}.
    """
    paragraphs: dict[str, Paragraph] = {}
    sides: tuple[list[Question], list[Question]] = ([], [])
    for number, row in enumerate(map(json.loads, file.read_text(encoding="utf-8").splitlines()), 1):
        try:
            own = [_paragraph(each["title"], each["text"]) for each in row["paragraphs"]]
            gold = [paragraph.id for paragraph in own if paragraph.title in row["supporting"]]
            question, aliases = row["question"], row.get("aliases", [])
            answer = row["answer"]
        except (KeyError, TypeError) as cause:
            raise SystemExit(
                f"{file}, row {number}: {cause}: expected question, answer, paragraphs and supporting"
            ) from cause
        if not gold:
            raise SystemExit(f"{file}, row {number}: supporting: expected titles of paragraphs of this row")
        paragraphs.update((paragraph.id, paragraph) for paragraph in own)
        held_out = hashlib.md5(question.encode()).digest()[0] < HELD_OUT
        sides[held_out].append(Question(question, answer, aliases, gold, str(corpus_file.resolve())))
    corpus_file.write_text("".join(json.dumps(asdict(paragraph)) + "\n" for paragraph in paragraphs.values()))
    return sides


@lru_cache(maxsize=8)
def load(name: str, split: str) -> list[Question]:
    """The questions of a set, "train" or "dev", each once."""
    rows = _file_rows(name, split) if _root() else _hub_rows(name, split)
    questions = {
        row["question"]: Question(row["question"], row["answer"], row["aliases"], row["supporting"])
        for row in rows
        if row["supporting"]
    }
    return list(questions.values())


@lru_cache(maxsize=2)
def corpus(file: str | None = None) -> list[Paragraph]:
    """Every paragraph that a search can show; those of `file`, or of the three sets."""
    if file is not None:
        return [Paragraph(**json.loads(line)) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    root = _root()
    if root is not None:
        return [Paragraph(row["id"], row["title"], row["text"]) for row in _lines(root / "corpus.jsonl.gz")]
    paragraphs: dict[str, Paragraph] = {}
    for name in SETS:
        for split in HUB_QUESTIONS:
            for row in _hub_rows(name, split):
                paragraphs.update((paragraph.id, paragraph) for paragraph in row["paragraphs"])
    return list(paragraphs.values())


def _root() -> Path | None:
    """The folder with the sets; None where they come from the hub."""
    root = os.environ.get("AGL_DATA")
    folder = Path(root, "multihop") if root else None
    return folder if folder is not None and folder.is_dir() else None


def _file_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    root = _root()
    assert root is not None
    return _lines(root / name / f"{split}.jsonl.gz")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


@lru_cache(maxsize=6)
def _hub_rows(name: str, split: str) -> list[dict[str, Any]]:
    hub, config = HUB[name]
    try:
        from datasets import load_dataset
    except ImportError as cause:
        where = (
            f"{os.environ['AGL_DATA']}/multihop does not exist" if "AGL_DATA" in os.environ else "AGL_DATA is not set"
        )
        raise FileNotFoundError(f"{where}, and reading {hub} from the hub needs: pip install datasets") from cause
    kept = f"{'validation' if split == 'dev' else 'train'}[:{HUB_QUESTIONS[split]}]"
    rows = load_dataset(hub, config, split=kept)
    read = read_musique if name == "musique" else read_hotpotqa
    return [read(row) for row in rows]


def read_musique(row: dict[str, Any]) -> dict[str, Any]:
    """A row of MuSiQue's own format as {question, answer, aliases, supporting, paragraphs}."""
    paragraphs = [_paragraph(p["title"], p["paragraph_text"]) for p in row["paragraphs"]]
    gold = [p.id for p, own in zip(paragraphs, row["paragraphs"], strict=True) if own["is_supporting"]]
    return _row(row, row["answer_aliases"], gold, paragraphs)


def read_hotpotqa(row: dict[str, Any]) -> dict[str, Any]:
    """The same for a row of HotpotQA's own format, which 2Wiki has, too."""
    context = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    paragraphs = [_paragraph(title, "".join(sentences)) for title, sentences in context]
    titles = set(row["supporting_facts"]["title"])
    return _row(row, [], [p.id for p in paragraphs if p.title in titles], paragraphs)


def _row(row: dict[str, Any], aliases: list[str], gold: list[str], paragraphs: list[Paragraph]) -> dict[str, Any]:
    return {
        "question": row["question"],
        "answer": row["answer"],
        "aliases": aliases,
        "supporting": gold,
        "paragraphs": paragraphs,
    }


def _paragraph(title: str, text: str) -> Paragraph:
    return Paragraph(hashlib.md5(f"{title}\n{text}".encode()).hexdigest()[:12], title, text)
