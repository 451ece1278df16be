"""The light core (no extra) installs and works on every Python we promise: workers of that Python, a server of this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout")
LIGHT = (
    "tests/adapters",
    "--ignore=tests/adapters/test_rendered.py",
    "tests/algorithms/test_lightning_rl.py",
    "tests/cli/test_light_imports.py",
    "tests/runner/test_command.py",
    "tests/runner/test_failure.py",
    "tests/runner/test_user_code.py",
    "tests/runner/test_worker_process.py",
    "tests/config/test_config.py",
    "tests/test_errors.py",
    "tests/tracing/test_air_rules.py",
    "tests/tracing/test_tracer.py",
)
"""Tests of what an agent's machine runs; what is ignored of them needs an extra."""


def interpreter(version: str) -> str | None:
    """Returns a Python of this version from the PATH, or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    candidates = [found for found in (shutil.which(f"python{version}"), *reversed(installed)) if found]
    working = (found for found in candidates if subprocess.run([found, "-c", ""], capture_output=True).returncode == 0)
    return next(working, None)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_light_core_installs_and_passes_its_tests(version: str, tmp_path: Path) -> None:
    if (python := interpreter(version)) is None:
        pytest.skip(f"there is no Python {version} here")
    fresh = str(tmp_path / "venv" / "bin" / "python")
    uv = Path(sys.executable).with_name("uv")
    pip = [str(uv), "pip", "install", "--python", fresh] if uv.exists() else [fresh, "-m", "pip", "install"]
    pip += ["--quiet", "-c", "requirements.lock"]
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"]

    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    subprocess.run([*pip, ".", *TOOLS], cwd=ROOT, check=True)
    tests = subprocess.run(
        [fresh, "-m", "pytest", *options, *LIGHT],
        cwd=ROOT,
        env={**os.environ, "AGL_TEST_SERVER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )

    assert tests.returncode == 0, tests.stdout[-5000:] + tests.stderr[-2000:]
    absent = subprocess.run([fresh, "-c", "import fastapi"], capture_output=True)
    assert absent.returncode != 0, "an extra's package came with the light core"


def test_every_file_of_the_light_core_exists() -> None:
    assert [path for path in LIGHT if not path.startswith("-") and not (ROOT / path).exists()] == []
