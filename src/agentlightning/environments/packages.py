"""The place where an environment's package runs: in this Python, or in a virtual environment of its own beside this package.

Most of these packages pin what others pin otherwise, so `install` makes a virtual environment with the pinned version, the
dependencies of agentlightning alone, and a link to this installation: whatever changes here is there, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from agentlightning.environments.base import kinds
from agentlightning.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The package that a kind plays."""

    requirements: tuple[str, ...]
    """Pinned: without a version, installers silently take an old release that conflicts with nothing. One of git keeps its
    checkout, with the data that lie beside its code."""
    module: str
    """Importable where it is installed."""
    example: str
    python: tuple[int, int] = (3, 11)
    """The oldest Python that it runs on."""


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "reasoning-gym": Package(
            requirements=("reasoning-gym==0.1.25",),
            module="reasoning_gym",
            example="reasoning-gym:chain_sum?max_digits=2",
        ),
        "gymnasium": Package(
            requirements=("gymnasium[toy-text]==1.4.0", "minigrid==3.2.0"),
            module="gymnasium",
            example="gymnasium:FrozenLake-v1?is_slippery=false",
        ),
        "harbor": Package(
            requirements=("harbor==0.26.0",), module="harbor", example="harbor:./tasks?agent=terminus-2", python=(3, 12)
        ),
        "scienceworld": Package(
            requirements=("scienceworld==1.2.3",),
            module="scienceworld",
            example="scienceworld:find-living-thing",
        ),
        "tau2": Package(
            requirements=(
                "git+https://github.com/sierra-research/tau2-bench@a2c024725189473d2d7cea3a5cfdbcc67478e41f#egg=tau2",
            ),
            module="tau2",
            example="tau2:retail?user=customer",
            python=(3, 12),
        ),
        "textarena": Package(
            requirements=("textarena==0.7.4",), module="textarena", example="textarena:FrozenLake-v0?size=4"
        ),
        "textworld": Package(
            requirements=("textworld==1.7.0",), module="textworld", example="textworld:?nb_rooms=3&quest_length=3"
        ),
        "verifiers": Package(
            requirements=("verifiers==0.4.0", "uv==0.13.9"), module="verifiers", example="verifiers:./my-taskset"
        ),
    }
)
"""By kind. One that is not here needs no package of its own, or is somebody else's plug-in."""


class KindRow(NamedTuple):
    """A kind, for people."""

    kind: str
    example: str
    package: str
    installed: str


def kind_rows() -> list[KindRow]:
    """Every kind that is known here."""
    rows = []
    for kind in kinds():
        package = PACKAGES.get(kind)
        if package is None:
            rows.append(KindRow(kind, f"{kind}:…", "", "here"))
            continue
        rows.append(KindRow(kind, package.example, " ".join(package.requirements), _place(kind, package)))
    return rows


def _place(kind: str, package: Package) -> str:
    if find_spec(package.module) is not None:
        return "here"
    try:
        return "own environment" if environment_folder(kind).exists() else "no"
    except ConfigError:
        return f"needs Python {package.python[0]}.{package.python[1]}"


def interpreter(kind: str, given: str | None = None) -> str:
    """The Python that has the package of a kind: the one `given`, this one, or that of `install`.

    ConfigError where there is none, with the command that makes one.
    """
    if given is not None:
        if shutil.which(given) is None:
            raise ConfigError(f"env.python: no such program: {given}")
        return given
    package = PACKAGES.get(kind)
    if package is None or find_spec(package.module) is not None:
        return sys.executable
    installed = environment_folder(kind) / "bin" / "python"
    if not installed.exists():
        raise ConfigError(f"env {kind}: {package.module} is not installed; install it with: agl env install {kind}")
    _link_ourselves(installed.parents[1])
    return str(installed)


def environment_folder(kind: str) -> Path:
    """The virtual environment of a kind, made or not. Its name has the pinned versions."""
    pins = "-".join(re.sub(r"[^\w.]+", "-", one) for one in PACKAGES[kind].requirements)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "agentlightning" / "environments" / f"{pins}-py{_python_for(kind)[1]}"


def install(kind: str, note: Callable[[str], None]) -> Path:
    """Make the virtual environment of a kind, or leave the one that is there; returns its folder.

    ConfigError for a kind without a package, and where no Python is new enough or the packages cannot be installed.
    """
    if kind not in PACKAGES:
        raise ConfigError(f"env install: expected one of {', '.join(sorted(PACKAGES))}, got {kind!r}")
    python, _ = _python_for(kind)
    folder = environment_folder(kind)
    if folder.exists():
        _link_ourselves(folder)
        note(f"{kind} is installed in {folder}")
        return folder
    made = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    pinned = [f"--editable={one}" if one.startswith("git+") else one for one in PACKAGES[kind].requirements]
    sources = f"--src={folder.parent / 'sources'}"
    note(f"installing {', '.join(PACKAGES[kind].requirements)} and what agentlightning needs into {folder}")
    try:
        _run([python, "-m", "venv", str(made)])
        _run(
            [
                str(made / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-compile",
                sources,
                *pinned,
                *_own_requirements(),
            ]
        )
        _link_ourselves(made)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _python_for(kind: str) -> tuple[str, str]:
    """An interpreter that is new enough, and its version as 3.12."""
    oldest = PACKAGES[kind].python
    if sys.version_info[:2] >= oldest:
        return sys.executable, f"{sys.version_info[0]}.{sys.version_info[1]}"
    for minor in range(oldest[1], oldest[1] + 4):
        pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
        for found in (shutil.which(f"python3.{minor}"), *map(str, pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))):
            if found is not None and _runs(found):
                return found, f"3.{minor}"
    version = f"{oldest[0]}.{oldest[1]}"
    raise ConfigError(
        f"env {kind}: needs Python {version} or newer, which is not here; install one as python{version}, for example with: "
        f"uv python install {version}"
    )


def _runs(python: str) -> bool:
    """False for a shim of pyenv whose version is not chosen, and for a Python without venv."""
    return subprocess.run([python, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0


def _own_requirements() -> list[str]:
    """Our dependencies without the extras. An entry point knows its distribution, whatever that is called."""
    (own,) = entry_points(group="agentlightning.engines", name="local")
    assert own.dist is not None
    return [one for one in own.dist.requires or () if "extra ==" not in one]


def _link_ourselves(environment: Path) -> None:
    """Another installation may have made the environment, or used it last."""
    (site,) = environment.glob("lib/python3*/site-packages")
    package = Path(__file__).resolve().parents[1]
    link = site / package.name
    if link.resolve() != package:
        new = site / f".{package.name}-{os.getpid()}"
        new.symlink_to(package)
        new.replace(link)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ConfigError(f"env install: {' '.join(command[:4])} … failed: {' '.join(last)[:500]}")
