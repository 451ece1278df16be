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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TEST_TIMEOUT_S = 60
"""What one test of a suite may take; a test that hangs fails, and the others go on."""

SUITE_TIMEOUT_S = 800.0
BARE = {"PYTHONPATH": str(HERE / "suites"), "PYTHONDONTWRITEBYTECODE": "1"}
"""Plugins for pytest stand beside the suites, which are not written to."""


@dataclass(frozen=True)
class SourceTests:
    """The tests of API resources in the source distribution of an SDK, of which those of served resources are run."""

    name: str
    address: str
    """Variable with the address that they read as TEST_API_BASE_URL."""
    model: str
    """A model that they look up."""
    folder: str = "tests/api_resources"


@dataclass(frozen=True)
class Suite:
    """Tests of one client library."""

    name: str
    environment: str
    """Suffix of the virtual environment, as in `.venv-clients-langchain`."""
    source: SourceTests | None = None
    """Where its tests are not in `suites/NAME`."""
    options: Sequence[str] = ()
    least: int = 1
    """How many of its tests have to pass."""

    @property
    def expected(self) -> dict[str, Any]:
        """What is checked in about it: `expected` failures, and for an SDK which files are `served`, and which are not."""
        path = HERE / "expected" / f"{self.name}.toml"
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @property
    def folder(self) -> Path:
        """The virtual environment."""
        return ROOT / f".venv-{self.environment}"

    @property
    def root(self) -> Path:
        """The folder that the suite's tests import from."""
        if self.source is None:
            return HERE / "suites"
        return next((self.folder / "sources").glob(f"{self.source.name}-*/"))

    def files(self) -> list[str]:
        """What its pytest is given."""
        if self.source is None:
            return [str(self.root / self.name)]
        return [str(self.root / self.source.folder / path) for path in self.expected["served"]]

    def options_of(self, report: Path) -> list[str]:
        """Options of its pytest."""
        plugins = ("-p", "attempt_key", "-k", "not aiohttp") if self.source else ()  # aiohttp: the same bytes once more
        configuration = ("-c", str(HERE / "suites" / "pytest.ini"), f"--rootdir={self.root}")
        quiet = ("-q", "-p", "no:cacheprovider", f"--basetemp={report.parent / 'tests'}")
        return [*quiet, *configuration, *plugins, f"--timeout={TEST_TIMEOUT_S}", f"--junitxml={report}", *self.options]

    def adapt(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The variables of a client, by which the suite's tests find the gateway."""
        return {**variables, **({"TEST_API_BASE_URL": variables[self.source.address]} if self.source else {})}

    def need(self) -> None:
        """Leaves the test out where the environment is not installed."""
        if not (self.folder / (".unpacked" if self.source else ".installed")).exists():
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
    words = ["python", "-m", "pytest", *suite.options_of(report), *suite.files()]
    output = await run_program(suite, words, suite.adapt(variables), folder)
    assert report.exists(), output[-4000:]
    return Results(read_report(report), output)


async def run_program(suite: Suite, words: Sequence[str], variables: Mapping[str, str], folder: Path) -> str:
    """Runs a program of the suite's environment, which may take so long and no longer; returns what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(str(suite.folder / "bin" / words[0]), *words[1:]),
        cwd=suite.root,
        env={**_bare_environment(), "HOME": str(folder), **BARE, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), SUITE_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode(errors="replace")


def read_report(report: Path) -> dict[str, str]:
    """Reads a JUnit report: by `file::class::test` what became of it. A test with a failed teardown has failed."""
    found: dict[str, str] = {}
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
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
    return {pattern: group["reason"] for group in suite.expected.get("expected", ()) for pattern in group["tests"]}


def unlisted_files(suite: Suite) -> list[str]:
    """Files with tests in a source distribution that are listed neither as served nor as not served."""
    assert suite.source is not None
    folder = suite.root / suite.source.folder
    listed = [*suite.expected["served"], *(each for group in suite.expected["not_served"] for each in group["files"])]
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("test_*.py"))
    return [path for path in found if not any(fnmatch.fnmatchcase(path, each) for each in listed)]


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
