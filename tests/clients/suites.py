"""Suites that others wrote, as processes in environments of their own, and their results against a checked-in list.

Every suite is run by the pytest of its environment, which writes a JUnit report; `expected/NAME.toml` lists the tests that
may not pass, with the reason. Driven by test_suites.py.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import tomllib
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TEST_TIMEOUT_S = 60
"""What one test of a suite may take; a test that hangs fails, and the others go on."""

SUITE_TIMEOUT_S = 800.0


@dataclass(frozen=True)
class Suite:
    """Tests of one client library."""

    name: str
    environment: str
    """Suffix of the virtual environment, `.venv-clients-…`, and name of its lock file."""
    paths: Sequence[str] = ()
    """Files or folders relative to this folder; by default `suites/NAME`."""
    options: Sequence[str] = ()
    least: int = 1
    """How many of its tests have to pass."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment."""

    @property
    def folder(self) -> Path:
        """The virtual environment."""
        return ROOT / f".venv-clients-{self.environment}"

    def need(self) -> None:
        """Leaves the test out where the environment is not installed."""
        if not (self.folder / ".installed").exists():
            pytest.skip(f"needs {self.folder.name}: `make clients` installs it")


@dataclass(frozen=True)
class Results:
    """What became of each test of a suite: `passed`, `skipped`, or the message of its failure."""

    by_test: Mapping[str, str]
    output: str

    @property
    def passed(self) -> list[str]:
        return [name for name, result in self.by_test.items() if result == "passed"]

    @property
    def failed(self) -> dict[str, str]:
        return {name: result for name, result in self.by_test.items() if result not in ("passed", "skipped")}


async def run_suite(suite: Suite, variables: Mapping[str, str], folder: Path) -> Results:
    """Runs a suite whose tests find the gateway by these variables."""
    report = folder / "report.xml"
    paths = [str(HERE / path) for path in suite.paths or (f"suites/{suite.name}",)]
    options = ("-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}", f"--timeout={TEST_TIMEOUT_S}")
    process = await asyncio.create_subprocess_exec(
        *(str(suite.folder / "bin" / "python"), "-m", "pytest", *options, f"--junitxml={report}", *suite.options),
        *("-c", str(HERE / "suites" / "pytest.ini"), *paths),
        cwd=folder,
        env={**_bare_environment(), "HOME": str(folder), **suite.variables, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), SUITE_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    output = out.decode(errors="replace")
    assert report.exists(), output[-4000:]
    return Results(read_report(report), output)


def read_report(report: Path) -> dict[str, str]:
    """Reads a JUnit report: by `file::class::test` what became of it. A test with a failed teardown has failed."""
    found: dict[str, str] = {}
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}".replace("suites.", "")
        result = "passed"
        for kind in case:
            if kind.tag in ("failure", "error"):
                result = kind.get("message") or kind.tag
            elif kind.tag == "skipped":
                result = f"xfailed: {kind.get('message')}" if kind.get("type") == "pytest.xfail" else "skipped"
        if found.get(name, "passed") in ("passed", "skipped"):
            found[name] = result
    return found


def expected_failures(suite: Suite) -> dict[str, str]:
    """Patterns of the tests of a suite that are known not to pass, with the reason."""
    path = HERE / "expected" / f"{suite.name}.toml"
    if not path.exists():
        return {}
    groups = tomllib.loads(path.read_text(encoding="utf-8"))["expected"]
    return {pattern: group["reason"] for group in groups for pattern in group["tests"]}


def check_results(results: Results, expected: Mapping[str, str], least: int) -> None:
    """Fails at a failure that is not listed, at a listed test that passes, and at a list that names no test."""
    failed = results.failed
    unexpected = {name: text for name, text in failed.items() if not any(_named(name, each) for each in expected)}
    passing = [name for name in results.passed if any(_named(name, each) for each in expected)]
    unknown = [each for each in expected if not any(_named(name, each) for name in results.by_test)]
    told = "\n".join(f"  {name}: {' '.join(text.split())[:300]}" for name, text in unexpected.items())
    assert not unexpected, f"{len(unexpected)} tests fail that are not listed:\n{told}\n{results.output[-1500:]}"
    assert not passing, f"these are listed as failing, and pass: {passing}"
    assert not unknown, f"no test has these listed names: {unknown}"
    assert len(results.passed) >= least, f"{len(results.passed)} tests passed, at least {least} must"


def _named(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _bare_environment() -> dict[str, str]:
    kept = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE")
    return {name: os.environ[name] for name in kept if name in os.environ}
