"""Tasks, and demonstrations for a tiny model in which the system prompt decides how a name is written."""

import json
import random

LETTERS = "abcdefgh"
STYLES = {"answer in small letters": str.lower, "answer in capital letters": str.upper}


def write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def correct(task, result):
    """The reward function: the name in capital letters, and nothing else."""
    return float(str(result.output).strip() == task["name"].upper())


if __name__ == "__main__":
    rng = random.Random(0)
    names = [a + b for a in LETTERS for b in LETTERS]
    rng.shuffle(names)
    demos = [
        [
            {"role": "system", "content": system},
            {"role": "user", "content": f"write {name}"},
            {"role": "assistant", "content": style(name)},
        ]
        for name in names
        for system, style in STYLES.items()
        for _ in range(12)
    ]
    rng.shuffle(demos)
    write("demos.jsonl", [{"messages": messages} for messages in demos])
    write("tasks.jsonl", [{"question": f"write {name}", "name": name} for name in names])
