"""`make demo` installs its own part of the lock: the same versions, and what the extras `train` and `gguf` need."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def pins(name: str) -> set[str]:
    return {line for line in (ROOT / name).read_text().splitlines() if "==" in line}


def plain(name: str) -> str:
    return name.replace("_", "-").lower()


def test_the_demo_has_the_versions_of_everything_else() -> None:
    assert pins("requirements-demo.lock") < pins("requirements.lock")


def test_the_demo_has_what_the_extras_train_and_gguf_name_and_what_those_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = {plain(pin.split("==")[0]) for pin in pins("requirements-demo.lock")}
    named = [
        Requirement(one) for one in (*project["dependencies"], *extras["server"], *extras["train"], *extras["gguf"])
    ]
    for package in pinned:
        needed = map(Requirement, importlib.metadata.distribution(package).requires or ())
        named += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert {plain(one.name) for one in named} - pinned - {"agentlightning-gateway", "torch"} == set()
