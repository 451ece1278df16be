"""The file of a project that names the packages which its agent imports, and how an image installs them.

Looks at names of files and at pyproject.toml; resolves nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from agentlightning.config.file import read_toml
from agentlightning.errors import ConfigError

# Of each kind of file, lines that name other files of the project.
NAMED_FILES = {
    "requirements": r"^\s*(-[rce]\b|--(requirement|constraint|editable)\b|\.{0,2}/|file:)|@\s*(file:|\.{0,2}/)",
    "uv.lock": r'source = \{ (editable|directory|virtual|path) = "(?!\.")',  # "." is the project, which is not installed
    "pyproject.toml": r"^dynamic\b[^\]]*dependencies",
}
UV_VERSION = "0.9.7"


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The files that name an agent's Python packages, and the commands that install them."""

    files: tuple[str, ...]
    """Copied into the image before the agent's code, so that a change of the code alone installs nothing again; "." if they
    name other files of the project."""
    commands: tuple[str, ...]
    """Shell commands, run in the folder with the files."""
    sentence: str
    """Says where they were found, for the reader of the image's file."""


def find_dependencies(root: Path) -> Dependencies:
    """Finds the packages of a project: of uv.lock, else of requirements*.txt, else of pyproject.toml.

    ConfigError if several requirements files could be meant.
    """
    found = _of_a_file(root)
    file = found.files[-1] if found.files else ""
    lines = next((lines for kind, lines in NAMED_FILES.items() if file.startswith(kind)), None)
    text = (root / file).read_bytes().decode("utf-8", errors="replace") if lines is not None else ""
    if lines is None or not re.search(lines, text, re.MULTILINE):
        return found
    return replace(
        found, files=(".",), sentence=f"{found.sentence} It names files of the project: all of it is copied first."
    )


def _of_a_file(root: Path) -> Dependencies:
    install = "uv pip install --no-cache --python /opt/venv/bin/python --requirement"
    if (root / "uv.lock").is_file() and (root / "pyproject.toml").is_file():
        export = "uv export --frozen --no-dev --no-emit-project --format requirements-txt --output-file /tmp/agent.txt"
        sentence = "uv.lock: every version and hash is fixed there."
        return Dependencies(("pyproject.toml", "uv.lock"), (export, f"{install} /tmp/agent.txt"), sentence)
    if requirements := _requirements(root):
        sentence = f"{requirements}. What it leaves open is resolved when the image is built."
        return Dependencies((requirements,), (f"{install} {requirements}",), sentence)
    project = read_toml(root / "pyproject.toml").get("project") if (root / "pyproject.toml").is_file() else None
    if isinstance(project, dict) and (project.get("dependencies") or "dependencies" in project.get("dynamic", ())):
        sentence = "[project] of pyproject.toml. It fixes no versions: `uv lock` makes a file that does."
        return Dependencies(("pyproject.toml",), (f"{install} pyproject.toml",), sentence)
    none = (
        "none: no uv.lock, no requirements*.txt and no [project] with dependencies in pyproject.toml next to the "
        "configuration, so the image has agentlightning alone; list what the agent imports in requirements.txt."
    )
    return Dependencies((), (), none)


def _requirements(root: Path) -> str | None:
    """Name of the requirements file; None if there is none. Those that say dev, test or docs are for other people."""
    names = sorted(path.name for path in root.glob("requirements*.txt"))
    if "requirements.txt" in names:
        return "requirements.txt"
    names = [name for name in names if not any(word in name for word in ("dev", "test", "doc", "lint"))]
    if len(names) > 1:
        raise ConfigError(
            f"requirements*.txt: expected one file, or one called requirements.txt, got {', '.join(names)}"
        )
    return names[0] if names else None
