"""Every extra that pyproject.toml, the documents and the error sentences name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
NAMED = re.compile(
    r"""agentlightning\[([\w,]+)\]"""
    r"""|["']\.\[([\w,]+)\]["']"""
    r"""|extra `(\w+)`"""
    r"""|MissingExtraError\([^)\n]*, "(\w+)"\)"""
)


def test_every_extra_that_is_named_exists() -> None:
    files = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    files += [path for path in ROOT.glob("src/**/*") if path.suffix in (".py", ".j2", ".jinja")]
    named = {
        (path.relative_to(ROOT).as_posix(), extra)
        for path in files
        for groups in NAMED.findall(path.read_text(encoding="utf-8"))
        for extra in "".join(groups).split(",")
    }

    assert {extra for _, extra in named} >= {"train", "server", "lora", "deploy"}
    assert sorted((path, extra) for path, extra in named if extra not in EXTRAS) == []
