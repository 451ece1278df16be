"""check_files: has the validators of other people that are installed check the files of a deployment.

Driven by `agl deploy --check` and by tests. A validator that is not on the PATH is named, not replaced. Knows their command
lines and nothing of what they check.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

TIMEOUT_S = 300.0
MAX_TEXT = 2000
"""Characters of a validator's complaints that are shown."""
YAMLLINT = (
    "{extends: default, rules: {line-length: {max: 200}, document-start: disable, comments: {min-spaces-from-content: 1}, "
    "comments-indentation: disable}}"
)
KUBERNETES_VERSION = "1.31"
PLAIN_KINDS = ("postgresql.cnpg.io/", "keda.sh/", "ray.io/", "monitoring.coreos.com/", "kustomize.config.k8s.io/")
"""API groups of operators, and kustomize's own: of these kinds kubernetes-validate has no schema."""
HELM = """
import json, sys
import helm_python as helm
found = helm.lint(sys.argv[1])
with helm.Chart.load(sys.argv[1]) as chart:
    rendered = chart.render({}, name="check", namespace="check")
for name, text in sorted(rendered.items()):
    print("---\\n" + text)
bad = [one for one in found["messages"] if one["severity"] > 1]  # 1: advice, such as an icon
sys.exit(str(bad) if bad else 0)
"""
"""Lint and render by Helm's own code, where it is installed as a Python package and not as a program."""


@dataclass(frozen=True, slots=True)
class ValidatorFinding:
    """The verdict of one validator on a folder."""

    validator: str
    verdict: Literal["passed", "failed", "absent", "skipped"]
    text: str = ""


def check_files(folder: Path, files: Iterable[str], search_path: str | None = None) -> list[ValidatorFinding]:
    """Every validator's verdict on these files of a folder; `search_path`: where programs are, in place of PATH.

    One that has nothing to check here is left out.
    """
    names = sorted(files)
    found = []
    for check in (_hadolint, _shellcheck, _yamllint, _compose, _helm, _kustomize, _kubernetes, _terraform):
        finding = check(_Place(folder, names, search_path))
        found += [finding] if finding is not None else []
    if any(name.endswith(".tf") for name in names):
        found.append(ValidatorFinding("cfn-lint", "skipped", "these files are Terraform's, not CloudFormation's"))
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    folder: Path
    files: list[str]
    search_path: str | None

    def matching(self, *patterns: str) -> list[str]:
        """The files that match one of these patterns."""
        return [name for name in self.files if any(fnmatch(name, pattern) for pattern in patterns)]

    def program(self, name: str) -> str | None:
        """The path of a program; None where it is not installed."""
        return shutil.which(name, path=self.search_path)

    def run(self, *command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder to its end."""
        try:
            return subprocess.run(
                command, cwd=self.folder, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as cause:
            return subprocess.CompletedProcess(command, 1, "", str(cause))


Check = Callable[[_Place], ValidatorFinding | None]


def _over_files(name: str, arguments: tuple[str, ...], *patterns: str) -> Check:
    """A validator that takes files on its command line."""

    def check(place: _Place) -> ValidatorFinding | None:
        files = place.matching(*patterns)
        if not files:
            return None
        program = place.program(name)
        if program is None:
            return ValidatorFinding(name, "absent", "not installed")
        return _judged(name, place.run(program, *arguments, *files), f"{len(files)} files")

    return check


_hadolint = _over_files("hadolint", (), "*.Dockerfile")
_shellcheck = _over_files("shellcheck", (), "*.sh")
# Templates of a chart are no YAML before Helm has rendered them.
_plain_yaml = (
    "compose.yaml",
    "prometheus.yaml",
    "grafana/*.yaml",
    "kustomize/*.yaml",
    "chart/*.yaml",
    "*/values*.yaml",
)


def _yamllint(place: _Place) -> ValidatorFinding | None:
    files = [name for name in place.matching(*_plain_yaml) if not name.startswith("chart/templates/")]
    if not files:
        return None
    program = place.program("yamllint")
    if program is None:
        return ValidatorFinding("yamllint", "absent", "not installed")
    return _judged("yamllint", place.run(program, "--config-data", YAMLLINT, *files), f"{len(files)} files")


def _compose(place: _Place) -> ValidatorFinding | None:
    if not place.matching("compose.yaml"):
        return None
    docker, other = place.program("docker"), place.program("podman-compose")
    if docker is not None and not place.run(docker, "compose", "version").returncode:
        name, program = "docker compose config", [docker, "compose"]
    elif other is not None and place.program("podman") is not None:  # which it asks for its version
        name, program = "podman-compose config", [other]
    else:
        return ValidatorFinding(
            "docker compose config", "absent", "neither docker compose nor podman with podman-compose is installed"
        )
    with tempfile.NamedTemporaryFile("w", suffix=".env") as values:  # any value will do
        example = (place.folder / ".env.example").read_text(encoding="utf-8")
        values.write("".join(f"{line}x\n" for line in example.splitlines() if line.endswith("=")))
        values.flush()
        done = place.run(*program, "--env-file", values.name, "--file", "compose.yaml", "config", "--quiet")
    return _judged(name, done)


def _helm(place: _Place) -> ValidatorFinding | None:
    if not place.matching("chart/Chart.yaml"):
        return None
    helm, python = place.program("helm"), place.program("python3")
    if helm is not None:
        done = place.run(helm, "lint", "chart")
        done = place.run(helm, "template", "check", "chart") if not done.returncode else done
    elif python is not None and not place.run(python, "-c", "import helm_python").returncode:
        done = place.run(python, "-c", HELM, "chart")
    else:
        return ValidatorFinding(
            "helm lint, helm template", "absent", "neither helm nor the package helm-python-sdk is installed"
        )
    return _judged("helm lint, helm template", done)


def _kustomize(place: _Place) -> ValidatorFinding | None:
    if not place.matching("kustomize/kustomization.yaml"):
        return None
    if (program := place.program("kustomize")) is not None:
        return _judged("kustomize build", place.run(program, "build", "kustomize"))
    if (program := place.program("kubectl")) is not None:
        return _judged("kustomize build", place.run(program, "kustomize", "kustomize"))
    return ValidatorFinding("kustomize build", "absent", "neither kustomize nor kubectl is installed")


def _kubernetes(place: _Place) -> ValidatorFinding | None:
    """Of the plain objects: the chart's are the same, as a test of ours says."""
    files = place.matching("kustomize/*.yaml")
    if not files:
        return None
    name, program = "kubernetes-validate", place.program("kubernetes-validate")
    if program is None:
        return ValidatorFinding(name, "absent", "not installed")
    documents = [
        document
        for file in files
        for document in f"\n{(place.folder / file).read_text(encoding='utf-8')}".split("\n---\n")
        if not any(f"apiVersion: {group}" in document for group in PLAIN_KINDS)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as objects:
        objects.write("\n---\n".join(documents))
        objects.flush()
        done = place.run(program, "--strict", "--quiet", "--kubernetes-version", KUBERNETES_VERSION, objects.name)
    return _judged(name, done, f"{len(documents)} objects; kinds of operators have no schema there")


def _terraform(place: _Place) -> ValidatorFinding | None:
    files = place.matching("*/*.tf")
    if not files:
        return None
    name = next((name for name in ("tofu", "terraform") if place.program(name)), None)
    program = place.program(name) if name is not None else None
    if name is None or program is None:
        return ValidatorFinding("terraform fmt, validate", "absent", "neither tofu nor terraform is installed")
    folder = files[0].partition("/")[0]
    done = place.run(program, "fmt", "-check", "-diff", folder)
    if done.returncode:
        return _judged(f"{name} fmt", done)
    with tempfile.TemporaryDirectory() as copy:  # what it downloads does not belong into the folder
        for file in files:
            shutil.copy(place.folder / file, copy)
        if place.run(program, f"-chdir={copy}", "init", "-backend=false", "-input=false", "-no-color").returncode:
            return ValidatorFinding(
                f"{name} fmt", "passed", f"{name} validate was not run: its providers could not be installed"
            )
        return _judged(f"{name} fmt, validate", place.run(program, f"-chdir={copy}", "validate", "-no-color"))


def _judged(name: str, done: subprocess.CompletedProcess[str], passed: str = "") -> ValidatorFinding:
    if not done.returncode:
        return ValidatorFinding(name, "passed", passed)
    return ValidatorFinding(name, "failed", f"{done.stderr}\n{done.stdout}".strip()[:MAX_TEXT])
