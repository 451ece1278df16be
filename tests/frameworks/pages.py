"""What a page of docs/agents shows a reader: the files of a whole small agent, the lines that change, the command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "agents"
NAMED = re.compile(r"(?:#|//) ([\w.-]+\.\w+)$")
"""First line of a block that is a whole file, after a `#!` line if there is one: its name."""


@dataclass(frozen=True)
class Page:
    """One page, read as a reader would: blocks that begin with a file's name are that file, ```jsonl is the tasks."""

    path: Path

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and body of every fenced block."""
        text = self.path.read_text(encoding="utf-8")
        return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    @property
    def files(self) -> dict[str, str]:
        """Every file that the page prints, by name."""
        found = {}
        for language, body in self.blocks:
            first = next(line for line in body.splitlines()[:2] if not line.startswith("#!"))
            if language == "jsonl":
                found["tasks.jsonl"] = body
            elif named := NAMED.match(first):
                found[named[1]] = body
        return found

    @property
    def changed(self) -> list[str]:
        """The lines that the page's diff adds to an agent that is not trained; empty where nothing changes."""
        diffs = [body for language, body in self.blocks if language == "diff"]
        return [line[1:].strip() for body in diffs for line in body.splitlines() if line.startswith("+")]

    @property
    def command(self) -> list[str]:
        """Words of the page's `agl train …`, after `agl`."""
        (line,) = [
            line
            for language, body in self.blocks
            if language == "bash"
            for line in body.replace("\\\n", " ").splitlines()
            if line.startswith("agl train ")
        ]
        return shlex.split(line, comments=True)[1:]

    def option(self, name: str) -> str | None:
        """Value of an option of that command."""
        words = self.command
        return words[words.index(name) + 1] if name in words else None

    def write(self, folder: Path, changed: Mapping[str, str] | None = None) -> None:
        """Everything that the page prints, into the folder of who follows it, but for files that `changed` has otherwise."""
        for name, body in {**self.files, **(changed or {})}.items():
            (folder / name).write_text(body, encoding="utf-8")


def page(name: str) -> Page:
    """The page of this name."""
    return Page(FOLDER / f"{name}.md")
