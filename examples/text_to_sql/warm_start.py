"""Makes the model that the text-to-SQL example trains: a tokenizer, a fresh Llama, and a warm start from demonstrations.

    python examples/text_to_sql/warm_start.py --to runs/text_to_sql-model                  # the generated databases
    python examples/text_to_sql/warm_start.py --to runs/spider-model --slice spider

The warm start teaches the protocol of the three agents. Its demonstrator for the generated databases mixes up opposites; for
Spider it follows the gold queries of a tenth of the training questions, with other names and other words blanked out each
time, and every fifth time with a mistake that the rewriter puts right where the database has a say. Reinforcement learning
then sees only whether rows are right. With --control it is what that is compared with: the same labels, more of the same.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import masking
import torch
from agent import BRIEF, MAX_QUERIES, is_refusal, with_real_names, with_short_names
from database import Database
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentlightning.demo import sql as company
from agentlightning.demo import tiny_model
from agentlightning.demo.imitation import Row, encode, imitate, linear_decay

CONTEXT = 384

LABELLED = 0.1
"""Share of Spider's training questions whose gold queries are demonstrated."""
BLANKED = 0.1
MISTAKES = 0.2
"""Share of the demonstrations whose first query has a mistake."""
WORDS = (
    *masking.KEYWORDS,
    *("1", "schema", "@", "~", "/", ":", "num", "txt", "oth", "empty", "one", "many", "right", "wrong", "again"),
    *(
        "no",
        "such",
        "column",
        "table",
        "near",
        "syntax",
        "error",
        "misuse",
        "of",
        "aggregate",
        "token",
        "incomplete",
        "input",
    ),
    *(f"T{index}" for index in range(masking.MAX_TABLES)),
    *(f"C{index}" for index in range(masking.MAX_COLUMNS)),
    *(f"V{index}" for index in range(masking.MAX_VALUES)),
)
CONFUSED = (("max", "min", "avg", "sum"), ("asc", "desc"), (">", "<", ">=", "<=", "=", "!="), ("and", "or"))

Message = dict[str, str]


@dataclass(frozen=True)
class Slice:
    """The recipe of the model of one slice of the task."""

    demonstrations: Callable[[int, float], tuple[list[Any], int]]
    """Seed, labelled share -> what is demonstrated in one epoch, and how many held-out questions there are."""
    demonstrate: Callable[[Any, random.Random], list[Message]]
    tokenizer: Callable[[list[Any], random.Random], PreTrainedTokenizerFast]
    hidden: int
    batch: int
    dropout: float
    epochs: int
    control_epochs: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Make and warm-start the model of the text-to-SQL example.")
    parser.add_argument("--to", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", choices=tuple(SLICES), default="generated")
    parser.add_argument(
        "--labelled", type=float, help=f"share of Spider's questions whose queries are shown [{LABELLED}]"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, help="how often each demonstration is seen")
    length.add_argument("--control", action="store_true", help="about as long as training on reward takes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.labelled is not None and arguments.slice != "spider":
        parser.error("--labelled: the generated demonstrations use no labels; give it with --slice spider")
    chosen = SLICES[arguments.slice]
    epochs = arguments.epochs or (chosen.control_epochs if arguments.control else chosen.epochs)
    rng = random.Random(arguments.seed)
    try:
        demonstrated, held_out = chosen.demonstrations(arguments.seed, arguments.labelled or LABELLED)
    except FileNotFoundError as cause:
        raise SystemExit(str(cause)) from cause
    tokenizer = chosen.tokenizer(demonstrated, rng)
    tiny_model.write(arguments.to, tokenizer, hidden=chosen.hidden, context=CONTEXT, seed=arguments.seed)
    loss = warm_start(arguments.to, chosen, demonstrated, epochs, rng)
    report = {
        "model": str(arguments.to),
        "seed": arguments.seed,
        "epochs": epochs,
        "labelled": len(demonstrated),
        "held_out": held_out,
        "loss": round(loss, 4),
    }
    sys.stdout.write(json.dumps(report) + "\n")


def warm_start(folder: Path, chosen: Slice, demonstrated: list[Any], epochs: int, rng: random.Random) -> float:
    """Supervised training in place; the last losses' mean."""
    seed = rng.randrange(2**31)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def rows() -> Iterator[list[Row]]:
        for items in _batches(demonstrated, chosen.batch, rng):
            encoded = [encode(tokenizer, chosen.demonstrate(item, rng)) for item in items]
            yield [row for row in encoded if len(row[0]) <= CONTEXT]

    updates = max(1, epochs * len(demonstrated) // chosen.batch)
    return imitate(
        folder, rows(), steps=updates, rate_at=linear_decay, weight_decay=0.05, dropout=chosen.dropout, seed=seed
    )


def conversation(row: data.Row, queries: list[str], verdicts: Callable[[str], str]) -> list[Message]:
    """Returns the conversation when the team writes these queries in turn; `verdicts` maps a shown result to a verdict.

    It ends where the checker agrees, or with the last of `queries`.
    """
    messages: list[Message] = []

    def say(asked: str, reply: str) -> None:
        messages.extend(({"role": "user", "content": asked}, {"role": "assistant", "content": reply}))

    asked = BRIEF.write.format(question=row["question"], schema=row["schema"])
    names = row.get("names", {})
    with Database(row["database"]) as database:
        for number, query in enumerate(queries, 1):
            say(asked, query)
            result = database.run(with_real_names(query, names))
            if number == MAX_QUERIES:
                break
            if result.error:
                asked = BRIEF.repair.format(error=with_short_names(result.error, names))
                continue
            shown = BRIEF.show(result)
            verdict = verdicts(shown)
            say(BRIEF.check.format(result=shown), verdict)
            if not is_refusal(verdict):
                break
            asked = BRIEF.rewrite
    return messages


def judge(shown: str) -> str:
    """The checker's habit: what is empty is wrong."""
    return "wrong" if shown == "empty" else "right"


def generated_demonstrations(seed: int, _: float) -> tuple[list[Any], int]:
    rng = random.Random(f"demonstrations {seed}")
    return [company.sample(rng, "train") for _ in range(3000)], data.HELD_OUT


def demonstrate_generated(task: dict[str, Any], rng: random.Random) -> list[Message]:
    """A team that often guesses the names in the schema, mostly picks the opposite of what is asked, and repairs errors."""
    row = data.generated(task)
    with closing(company.database(task["database"])) as connection:
        right = company.names(connection)
    guessed = rng.choice(company.TABLES), rng.choice(company.PAY_COLUMNS)
    first = right if rng.random() < company.LOOKS_AT_SCHEMA else guessed
    queries = [
        data.query(company.mistaken(task["plan"], rng), *names) for names in (first, *[right] * (MAX_QUERIES - 1))
    ]
    return conversation(row, queries, judge)


def generated_tokenizer(demonstrated: list[Any], rng: random.Random) -> PreTrainedTokenizerFast:
    messages = [message for task in demonstrated[:1000] for message in demonstrate_generated(task, rng)]
    return tiny_model.train_tokenizer((message["content"] for message in messages), (), vocabulary=400)


def spider_demonstrations(seed: int, labelled: float) -> tuple[list[Any], int]:
    """Labelled problems of the training databases; the others lend their words to the tokenizer only."""
    return labelled_problems(data.spider_problems("train"), seed, labelled), len(data.spider_heldout())


def labelled_problems(problems: list[data.Problem], seed: int, share: float = LABELLED) -> list[data.Problem]:
    """The share whose gold queries may be looked at."""
    labelled = [problem for problem in problems if problem.program]
    return random.Random(seed).sample(labelled, int(share * len(labelled)))


def demonstrate_spider(problem: data.Problem, rng: random.Random) -> list[Message]:
    """The gold query under other names, at times after a mistake that the database or the checker notices."""
    assert problem.program is not None
    drawn = masking.renumber(problem.row["names"], rng)
    question = data.blank_words(problem.row["question"], BLANKED, rng)
    row = problem.row | {
        "question": masking.renamed(question, drawn),
        "schema": masking.renamed(problem.row["schema"], drawn),
        "names": {drawn[name]: real for name, real in problem.row["names"].items()},
    }
    query = masking.renamed(problem.program, drawn)
    if rng.random() < MISTAKES:
        return conversation(row, [with_mistake(query, list(row["names"]), rng), query, query], judge)
    return conversation(row, [query], lambda _: "right")


def with_mistake(query: str, names: list[str], rng: random.Random) -> str:
    """The query with one word replaced by another of its kind: a name, an aggregate, a comparison, an order."""
    words = query.split()
    choices = []
    for index, word in enumerate(words):
        kinds = [kind for kind in CONFUSED if word in kind]
        others = [name for name in names if name[0] == word[0]] if masking.SHORT.fullmatch(word) else [*sum(kinds, ())]
        choices += [(index, other) for other in others if other != word][:4]
    if choices:
        index, other = rng.choice(choices)
        words[index] = other
    return " ".join(words)


def spider_tokenizer(demonstrated: list[Any], rng: random.Random) -> PreTrainedTokenizerFast:
    """Whole words, those that occur twice in the training questions and schemas (no label is looked at)."""
    rows = [problem.row for problem in data.spider_problems("train")]
    texts = (f"{row['question']} {row['schema']}" for row in rows)
    return tiny_model.word_tokenizer(texts, WORDS, min_times_seen=2)


def _batches(items: list[Any], size: int, rng: random.Random) -> Iterator[list[Any]]:
    while True:
        order = rng.sample(items, len(items))
        for start in range(0, max(1, len(order) - size + 1), size):
            yield order[start : start + size]


SLICES = {
    "generated": Slice(
        generated_demonstrations,
        demonstrate_generated,
        generated_tokenizer,
        hidden=64,
        batch=64,
        dropout=0.0,
        epochs=4,
        control_epochs=8,
    ),
    "spider": Slice(
        spider_demonstrations,
        demonstrate_spider,
        spider_tokenizer,
        hidden=128,
        batch=32,
        dropout=0.2,
        epochs=40,
        control_epochs=80,
    ),
}


if __name__ == "__main__":
    main()
