"""Other people's validators pass every file that `agl deploy` writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from deployed_project import CONFIGS, make_project

from agentlightning.deploy.project import read_project
from agentlightning.deploy.render import CLOUDS, TARGETS, render, write_files

BIN = Path(__file__).parents[2] / ".venv-deploy" / "bin"
YAMLLINT = (
    "{extends: default, rules: {line-length: {max: 200}, document-start: disable, comments: {min-spaces-from-content: 1}, "
    "comments-indentation: disable}}"
)
OPERATORS = ("postgresql.cnpg.io/", "kustomize.config.k8s.io/")
"""API groups of which kubernetes-validate has no schema."""
HCL = """
import json, sys
import hcl2
print(json.dumps(hcl2.load(open(sys.argv[1]))))
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BIN.exists(), reason=f"{BIN} does not exist: `make .venv-deploy/.installed`"),
]


def written(tmp_path: Path, config: str, target: str) -> tuple[Path, dict[str, str]]:
    project = read_project(make_project(tmp_path / "bot", CONFIGS[config]))
    files = render(project, target, "deploy")  # type: ignore[arg-type]
    write_files(project.root / "deploy", files)
    return project.root / "deploy", files


def run(folder: Path, program: str, *arguments: str) -> None:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run([program, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{program}: {done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    ("config", "target"),
    [(name, target) for target in TARGETS for name in (CONFIGS if target in ("compose", "kubernetes") else ["local"])],
)
def test_every_file_passes_its_validators(tmp_path: Path, config: str, target: str) -> None:
    folder, files = written(tmp_path, config, target)
    run(folder, "hadolint", *(name for name in files if name.endswith("Dockerfile")))
    run(folder, "shellcheck", *(name for name in files if name.endswith(".sh")))
    objects = [name for name in files if name.endswith(".yaml")]
    if objects:
        run(folder, "yamllint", "--config-data", YAMLLINT, *objects)
    if target not in ("docker", "compose"):
        documents = [
            document
            for name in objects
            for document in f"\n{files[name]}".split("\n---\n")
            if not any(f"apiVersion: {group}" in document for group in OPERATORS)
        ]
        (folder / "objects").write_text("\n---\n".join(documents))
        run(folder, "kubernetes-validate", "--strict", "--quiet", "--kubernetes-version", "1.31", "objects")


@pytest.mark.parametrize("cloud", CLOUDS)
def test_whatever_a_cloud_s_files_refer_to_is_declared_in_them(tmp_path: Path, cloud: str) -> None:
    """The providers' schemas cannot be had without a network; names can be compared."""
    folder, files = written(tmp_path, "local", cloud)
    path = f"{cloud}/main.tf"
    done = subprocess.run([BIN / "python3", "-c", HCL, folder / path], capture_output=True, text=True, check=True)
    parsed = json.loads(done.stdout)
    declared = {f"var.{bare(name)}" for block in parsed.get("variable", []) for name in block}
    declared |= {f"local.{bare(name)}" for block in parsed.get("locals", []) for name in block}
    declared |= {f"module.{bare(name)}" for block in parsed.get("module", []) for name in block}
    for kind, prefix in (("resource", ""), ("data", "data.")):
        for block in parsed.get(kind, []):
            declared |= {f"{prefix}{bare(type_)}.{bare(name)}" for type_, named in block.items() for name in named}
    text = re.sub(r"(?m)^\s*#.*", "", files[path])
    providers = {"aws": "aws", "azure": "azurerm", "gcp": "google"}[cloud]
    named = set(re.findall(rf"(?<![\w.\"/-])((?:data\.)?(?:{providers}|random)_\w+\.\w+)", text))
    named |= set(re.findall(r"(?<![\w.])((?:var|local|module)\.\w+)", text))
    assert named
    assert named <= declared
    assert {one for one in declared if one.startswith("var.")} == {one for one in named if one.startswith("var.")}


def bare(name: str) -> str:
    """A name without the quotes that a parser leaves."""
    return name.strip('"')
