"""Every extra that pyproject.toml, the documents and the error sentences name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
NAMED = re.compile(
    r"""(?:agentlightning-gateway|\.whl)\[([\w,]+)\]"""
    r"""|["']\.\[([\w,]+)\]["']"""
    r"""|extra `(\w+)`"""
    r"""|MissingExtraError\([^)\n]*, "(\w+)"\)"""
)


def _files() -> list[Path]:
    files = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    return files + [path for path in ROOT.glob("src/**/*") if path.suffix in (".py", ".sh", ".Dockerfile")]


def test_nothing_says_to_install_another_product_of_our_name() -> None:
    of_an_index = re.compile(r"""install[^\n`]*["' ]agentlightning(\[|["'`\n])""")

    assert [path.name for path in _files() if of_an_index.search(path.read_text(encoding="utf-8"))] == []
    assert 'name = "agentlightning-gateway"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_extra_that_is_named_exists() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), extra)
        for path in _files()
        for groups in NAMED.findall(path.read_text(encoding="utf-8"))
        for extra in "".join(groups).split(",")
    }

    assert {extra for _, extra in named} >= {"train", "server", "lora", "deploy"}
    assert sorted((path, extra) for path, extra in named if extra not in EXTRAS) == []
