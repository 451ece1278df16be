"""Makes the model that the text-to-SQL example trains: a tokenizer, a fresh Llama, and a warm start from demonstrations.

    python examples/text_to_sql/warm_start.py --to runs/text_to_sql-model                  # the generated databases
    python examples/text_to_sql/warm_start.py --to runs/spider-model --slice spider
    python examples/text_to_sql/warm_start.py --to runs/joins-model --slice joins

The warm start teaches the protocol of the three agents. Its demonstrator for the generated databases mixes up opposites; for
Spider it follows the gold queries of a tenth of the training questions, with other names and other words blanked out each
time, and every fifth time with a mistake that the rewriter puts right where the database has a say. Over tables joined by
keys it follows a quarter; mistakes are more frequent, noticed by the checker, and not imitated. Reinforcement learning then
sees only whether rows are right. With --control it is what that is compared with: the same labels, more of the same.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import masking
import torch
from agent import BRIEF, MAX_QUERIES, PREVIEW, Prompts, is_refusal, is_right, run_query
from database import Database, Result
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentlightning.demo import sql as company
from agentlightning.demo import tiny_model
from agentlightning.demo.imitation import Imitation, Row, encode, imitate
from agentlightning.engines.local.model import check_device
from agentlightning.errors import ConfigError

CONTEXT = 384
LARGE: dict[str, Any] = {
    "hidden": 1024,
    "layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "initializer_range": 0.02,
    "scaled": True,
}

LABELLED, LABELLED_JOINS = 0.1, 0.25
"""Share of Spider's training questions whose gold queries are demonstrated, over one table and over two."""
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
JOIN_WORDS = ("null", "twice", *(f"J{index}" for index in range(masking.MAX_JOINS)))
MISTAKEN_QUERIES = (0.5, 0.35, 0.15)
"""Share of the demonstrations over two tables with no, one and two of them."""
CONFUSED = (("max", "min", "avg", "sum"), ("asc", "desc"), (">", "<", ">=", "<=", "=", "!="), ("and", "or"))

Message = dict[str, str]
MISTAKE = "mistake"
"""Key of a message that is shown in a demonstration, but not imitated."""


@dataclass(frozen=True)
class Slice:
    """The recipe of the model of one slice of the task."""

    questions: Callable[[Path | None, int], tuple[list[Any], list[data.Row]]]
    """A user's own file, seed -> training questions and held-out rows."""
    demonstrated: Callable[[list[Any], int, float], list[Any]]
    """Training questions, seed, labelled share -> what is demonstrated in one epoch."""
    demonstrate: Callable[[Any, random.Random], list[Message]]
    tokenizer: Callable[[list[Any], random.Random], PreTrainedTokenizerFast]
    """Training questions -> their tokenizer."""
    hidden: int
    batch: int
    dropout: float
    epochs: int
    control_epochs: int
    labelled: float = LABELLED


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make and warm-start the model of the text-to-SQL example.")
    parser.add_argument("--to", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", choices=tuple(SLICES), default="generated")
    parser.add_argument("--data", type=Path, help="JSONL of your own questions (README.md says what a row holds)")
    shares = ", ".join(f"{name} {one.labelled}" for name, one in SLICES.items() if name != "generated")
    parser.add_argument("--labelled", type=float, help=f"share of the questions whose queries are shown [{shares}]")
    parser.add_argument("--large", action="store_true", help="a model of 329 million parameters, made on a GPU")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, help="how often each demonstration is seen")
    length.add_argument("--control", action="store_true", help="about as long as training on reward takes")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    if arguments.large:
        try:
            check_device("cuda")
        except ConfigError as cause:
            parser.error(f"--large: {cause}")
    for name in ("labelled", "data"):
        if getattr(arguments, name) is not None and arguments.slice == "generated":
            parser.error(f"--{name}: the generated demonstrations use no labels; give it with --slice spider or joins")
    chosen = SLICES[arguments.slice]
    epochs = arguments.epochs or (chosen.control_epochs if arguments.control else chosen.epochs)
    rng = random.Random(arguments.seed)
    try:
        training, held_out = chosen.questions(arguments.data, arguments.seed)
    except FileNotFoundError as cause:
        raise SystemExit(str(cause)) from cause
    demonstrated = chosen.demonstrated(training, arguments.seed, arguments.labelled or chosen.labelled)
    if len(demonstrated) < chosen.batch or not held_out:
        raise SystemExit(
            f"{len(demonstrated)} questions whose query is shown, {len(held_out)} held out; expected at least "
            f"{chosen.batch} and 1: give more questions of the slice, or a greater share of them with --labelled"
        )
    tokenizer = chosen.tokenizer(training, rng)
    shape = LARGE if arguments.large else {"hidden": chosen.hidden}
    parameters = tiny_model.write(arguments.to, tokenizer, context=CONTEXT, seed=arguments.seed, **shape)
    loss = warm_start(arguments.to, chosen, demonstrated, epochs, rng, device="cuda" if arguments.large else "cpu")
    report = {
        "model": str(arguments.to),
        "seed": arguments.seed,
        "parameters": parameters,
        "epochs": epochs,
        "labelled": len(demonstrated),
        "held_out": len(held_out),
        "loss": round(loss, 4),
    }
    if arguments.data is not None:
        for name, rows in (("train", data.training_rows(training, arguments.seed)), ("heldout", held_out)):
            path = arguments.to / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            report[name] = str(path)
    sys.stdout.write(json.dumps(report) + "\n")


def warm_start(
    folder: Path, chosen: Slice, demonstrated: list[Any], epochs: int, rng: random.Random, device: str
) -> float:
    """Supervised training in place; the last losses' mean."""
    seed = rng.randrange(2**31)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def rows() -> Iterator[list[Row]]:
        for items in _batches(demonstrated, chosen.batch, rng):
            encoded = [encode_right(tokenizer, chosen.demonstrate(item, rng)) for item in items]
            yield [row for row in encoded if len(row[0]) <= CONTEXT]

    updates = max(1, epochs * len(demonstrated) // chosen.batch)
    settings = Imitation(
        steps=updates, linear=True, weight_decay=0.05, dropout=chosen.dropout, seed=seed, device=device
    )
    return imitate(folder, rows(), settings)


def encode_right(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> Row:
    """Token ids, and which of them are imitated: what the assistant says, without its mistakes."""
    tokens, mask = encode(tokenizer, messages)
    ends = [place for place in range(len(mask)) if mask[place] and not (place + 1 < len(mask) and mask[place + 1])]
    said = [message for message in messages if message["role"] == "assistant"]
    begin = 0
    for message, end in zip(said, ends, strict=True):
        if MISTAKE in message:
            mask[begin : end + 1] = [False] * (end + 1 - begin)
        begin = end + 1
    return tokens, mask


def conversation(
    row: data.Row, queries: list[str], verdicts: Callable[[Result], str], prompts: Prompts = BRIEF
) -> list[Message]:
    """Returns the conversation when the team writes these queries in turn; `verdicts` maps a result to a verdict.

    It ends where the checker agrees, or with the last of `queries`.
    """
    messages: list[Message] = []

    def say(asked: str, reply: str) -> None:
        messages.extend(({"role": "user", "content": asked}, {"role": "assistant", "content": reply}))

    asked = prompts.write.format(question=row["question"], schema=row["schema"])
    names = row.get("names", {})
    with Database(row["database"]) as database:
        for number, query in enumerate(queries, 1):
            say(asked, query)
            result = run_query(database, query, names)
            if number == MAX_QUERIES:
                break
            if result.error:
                asked = prompts.repair.format(error=result.error)
                continue
            verdict = verdicts(result)
            say(prompts.check.format(result=prompts.show(result)), verdict)
            if not is_refusal(verdict):
                break
            asked = prompts.rewrite
    return messages


def judge(result: Result) -> str:
    """The checker's habit: what is empty is wrong."""
    return "wrong" if result.is_empty else "right"


def generated_questions(_: Path | None, seed: int) -> tuple[list[Any], list[data.Row]]:
    rng = random.Random(f"demonstrations {seed}")
    return [company.sample(rng, "train") for _ in range(3000)], data.generated_heldout()


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


def generated_tokenizer(training: list[Any], rng: random.Random) -> PreTrainedTokenizerFast:
    messages = [message for task in training[:1000] for message in demonstrate_generated(task, rng)]
    return tiny_model.train_tokenizer((message["content"] for message in messages), (), vocabulary=400)


def spider_questions(file: Path | None, _: int) -> tuple[list[data.Problem], list[data.Row]]:
    if file is None:
        return data.spider_problems("train"), data.spider_heldout()
    training, held_out = (data.problems_of(questions) for questions in data.spider.read_own(file))
    return training, [problem.row for problem in held_out]


def joins_questions(file: Path | None, _: int) -> tuple[list[data.Problem], list[data.Row]]:
    if file is None:
        return data.joins_problems("train"), data.joins_heldout()
    training, held_out = (data.problems_of(questions, joins=True) for questions in data.spider.read_own(file))
    return training, [problem.row for problem in held_out]


def labelled_problems(problems: list[data.Problem], seed: int, share: float = LABELLED) -> list[data.Problem]:
    """The share whose gold queries may be looked at; the others lend their words to the tokenizer only."""
    labelled = [problem for problem in problems if problem.program]
    return random.Random(seed).sample(labelled, int(share * len(labelled)))


def demonstrate_spider(problem: data.Problem, rng: random.Random) -> list[Message]:
    """The gold query under other names, at times after a mistake that the database or the checker notices."""
    row, query = under_other_names(problem, rng)
    if rng.random() < MISTAKES:
        return conversation(row, [with_mistake(query, list(row["names"]), rng), query, query], judge)
    return conversation(row, [query], lambda _: "right")


def demonstrate_joins(problem: data.Problem, rng: random.Random) -> list[Message]:
    """The gold query under other names, after up to two mistaken ones that the checker notices, but does not imitate."""
    row, query = under_other_names(problem, rng)
    (mistakes,) = rng.choices(range(MAX_QUERIES), MISTAKEN_QUERIES)
    wrong = [with_mistake(query, list(row["names"]), rng) for _ in range(mistakes)]

    def verdict(result: Result) -> str:
        return "right" if is_right(row, result) else "wrong"

    messages = conversation(row, [*wrong, query], verdict, PREVIEW)
    return [message | {MISTAKE: "yes"} if message["content"] in wrong else message for message in messages]


def under_other_names(problem: data.Problem, rng: random.Random) -> tuple[data.Row, str]:
    """The problem's row and gold query, with other short names and blanks."""
    assert problem.program is not None
    drawn = masking.renumber(problem.row["names"], rng)
    question = data.blank_words(problem.row["question"], BLANKED, rng)
    row = problem.row | {
        "question": masking.renamed(question, drawn),
        "schema": masking.renamed(problem.row["schema"], drawn),
        "names": {drawn[name]: real for name, real in problem.row["names"].items()},
    }
    return row, masking.renamed(problem.program, drawn)


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


def spider_tokenizer(training: list[data.Problem], rng: random.Random) -> PreTrainedTokenizerFast:
    """Whole words, those that occur twice in the training questions and schemas (no label is looked at)."""
    texts = (f"{problem.row['question']} {problem.row['schema']}" for problem in training)
    return tiny_model.word_tokenizer(texts, WORDS, min_times_seen=2)


def joins_tokenizer(training: list[data.Problem], rng: random.Random) -> PreTrainedTokenizerFast:
    texts = (f"{problem.row['question']} {problem.row['schema']}" for problem in training)
    return tiny_model.word_tokenizer(texts, (*WORDS, *JOIN_WORDS), min_times_seen=2)


def _batches(items: list[Any], size: int, rng: random.Random) -> Iterator[list[Any]]:
    while True:
        order = rng.sample(items, len(items))
        for start in range(0, max(1, len(order) - size + 1), size):
            yield order[start : start + size]


SLICES = {
    "generated": Slice(
        generated_questions,
        lambda training, _, __: training,
        demonstrate_generated,
        generated_tokenizer,
        hidden=64,
        batch=64,
        dropout=0.0,
        epochs=4,
        control_epochs=8,
    ),
    "spider": Slice(
        spider_questions,
        labelled_problems,
        demonstrate_spider,
        spider_tokenizer,
        hidden=128,
        batch=32,
        dropout=0.2,
        epochs=40,
        control_epochs=80,
    ),
    "joins": Slice(
        joins_questions,
        labelled_problems,
        demonstrate_joins,
        joins_tokenizer,
        hidden=128,
        batch=32,
        dropout=0.2,
        epochs=40,
        control_epochs=80,
        labelled=LABELLED_JOINS,
    ),
}


if __name__ == "__main__":
    main()
