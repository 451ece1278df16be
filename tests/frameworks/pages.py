"""The small agents that docs/agents.md lists: those of a page of their own, as printed, and those of examples/agents."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "agents"
EXAMPLES = ROOT / "examples" / "agents"
NAMED = re.compile(r"(?:#|//) ([\w.-]+\.\w+)$")
"""First line of a block that is a whole file, after a `#!` line if there is one: its name."""


@dataclass(frozen=True)
class Page:
    """A page, read as a reader would: blocks that begin with a file's name are that file, ```jsonl is the tasks. Or a folder
    of examples/agents, whose program begins with the commands."""

    path: Path

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and body of every fenced block of a page."""
        text = self.path.read_text(encoding="utf-8")
        return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    @property
    def files(self) -> dict[str, str]:
        """Every file of the agent, by name."""
        if self.path.is_dir():
            return {path.name: path.read_text(encoding="utf-8") for path in sorted(self.path.iterdir())}
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
        """Words of its `agl train …`, after `agl`."""
        text = "\n".join(self.files.values()) if self.path.is_dir() else self.path.read_text(encoding="utf-8")
        (line,) = re.findall(r"^(?:(?:#|//) +)?agl (train .*)$", text.replace("\\\n", " "), re.MULTILINE)
        return shlex.split(line, comments=True)

    def option(self, name: str) -> str | None:
        """Value of an option of that command."""
        words = self.command
        return words[words.index(name) + 1] if name in words else None

    def write(self, folder: Path, changed: Mapping[str, str] | None = None) -> None:
        """Writes the agent's files into a folder, but for files that `changed` has otherwise."""
        for name, body in {**self.files, **(changed or {})}.items():
            (folder / name).write_text(body, encoding="utf-8")


def page(name: str) -> Page:
    """The agent of this name."""
    path = FOLDER / f"{name}.md"
    return Page(path if path.exists() else EXAMPLES / name)
