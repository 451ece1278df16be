"""`make demo` installs its own part of the lock: the same versions, and all that the extra `train` names."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pins(name: str) -> set[str]:
    return {line for line in (ROOT / name).read_text().splitlines() if "==" in line}


def test_the_demo_has_the_versions_of_everything_else() -> None:
    assert pins("requirements-demo.lock") < pins("requirements.lock")


def test_the_demo_has_what_the_extra_train_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["server"], *extras["train"]]
    wanted = {re.split(r"[\[><=,]", one)[0].replace("_", "-").lower() for one in named} - {"agentlightning", "torch"}
    assert wanted <= {pin.split("==")[0].replace("_", "-").lower() for pin in pins("requirements-demo.lock")}
