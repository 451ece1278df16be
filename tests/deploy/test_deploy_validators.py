"""Other people's validators pass every file that `agl deploy` writes; the chart and the plain objects are the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed_project import CONFIGS, make_project

from agentlightning.deploy.folder import write_files
from agentlightning.deploy.project import read_project
from agentlightning.deploy.render import CLOUDS, TARGETS, render
from agentlightning.deploy.validators import check_files

pytestmark = pytest.mark.slow

BIN = Path(__file__).parents[2] / ".venv-deploy" / "bin"
SEARCH_PATH = f"{BIN}:{os.environ['PATH']}"
needs_validators = pytest.mark.skipif(not BIN.exists(), reason=f"{BIN} does not exist: `make .venv-deploy/.installed`")
RENDER = """
import json, sys
import helm_python as helm
with helm.Chart.load(sys.argv[1]) as chart:
    values = json.loads(sys.argv[2])
    print(json.dumps(chart.render(values, name="bot", namespace="bot")))
"""
HCL = """
import json, sys
import hcl2
print(json.dumps([hcl2.load(open(path)) for path in sys.argv[1:]]))
"""


def written(tmp_path: Path, config: str, target: str) -> tuple[Path, dict[str, str]]:
    project = read_project(make_project(tmp_path / "bot", CONFIGS[config]))
    files = render(project, target, "deploy")  # type: ignore[arg-type]
    write_files(project.root / "deploy", files)
    return project.root / "deploy", files


def in_environment(program: str, *arguments: str) -> Any:
    done = subprocess.run([BIN / "python3", "-c", program, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_validators
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_file_passes_its_validators(tmp_path: Path, config: str, target: str) -> None:
    folder, files = written(tmp_path, config, target)
    found = {one.validator: one for one in check_files(folder, files, SEARCH_PATH)}
    assert {one.verdict for one in found.values()} <= {"passed", "absent", "skipped"}, found
    must = {"hadolint", "shellcheck"}
    must |= {"yamllint"} if target != "docker" else set()
    must |= {"helm lint, helm template", "kubernetes-validate"} if target in ("kubernetes", *CLOUDS) else set()
    assert {name for name, one in found.items() if one.verdict == "passed"} >= must


@needs_validators
def test_a_file_that_is_wrong_fails_its_validator(tmp_path: Path) -> None:
    folder, files = written(tmp_path, "local", "kubernetes")
    (folder / "server.Dockerfile").write_text("FROM python\nRUN cd /tmp\n")
    (folder / "pin.sh").write_text("#!/bin/sh\nrm $1/*\n")
    (folder / "chart" / "templates" / "server.yaml").write_text("a: {{ .Values.nothing.there }}\n")
    (folder / "kustomize" / "console.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: 5}\n")
    found = {one.validator for one in check_files(folder, files, SEARCH_PATH) if one.verdict == "failed"}
    assert {"hadolint", "shellcheck", "helm lint, helm template", "kubernetes-validate"} <= found


def test_a_validator_that_is_not_installed_is_named(tmp_path: Path) -> None:
    folder, files = written(tmp_path, "local", "aws")
    found = {one.validator: one.verdict for one in check_files(folder, files, str(tmp_path))}
    assert found.pop("cfn-lint") == "skipped"
    assert set(found.values()) == {"absent"}
    assert "kubernetes-validate" in found


@needs_validators
@pytest.mark.parametrize("config", CONFIGS)
def test_the_chart_renders_to_the_plain_objects(tmp_path: Path, config: str) -> None:
    folder, files = written(tmp_path, config, "kubernetes")
    rendered = in_environment(RENDER, str(folder / "chart"), "{}")
    for path in (path for path in files if path.startswith("kustomize/")):
        name = path.partition("/")[2]
        if name in ("kustomization.yaml", "namespace.yaml"):
            continue
        chart = next(text for place, text in rendered.items() if place.endswith(f"/templates/{name}"))
        assert list(filter(None, yaml.safe_load_all(chart))) == list(yaml.safe_load_all(files[path])), name


@needs_validators
def test_the_charts_values_choose_autoscaler_database_and_pools(tmp_path: Path) -> None:
    folder, _ = written(tmp_path, "local", "kubernetes")
    pool = {"minReplicas": 0, "maxReplicas": 2, "resources": {}, "nodeSelector": {}, "tolerations": []}
    pools = [{"name": "cpu", "labels": ["gpu=no"], **pool}, {"name": "gpu", "labels": ["gpu=yes", "a=b"], **pool}]
    values = {"worker": {"autoscaling": "cpu", "pools": pools}, "postgres": {"enabled": False}}
    rendered = in_environment(RENDER, str(folder / "chart"), json.dumps(values))
    objects = [each for text in rendered.values() for each in yaml.safe_load_all(text) if each]
    kinds = [each["kind"] for each in objects]
    assert "ScaledObject" not in kinds
    assert "Cluster" not in kinds
    assert kinds.count("HorizontalPodAutoscaler") == 3
    arguments = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]["args"]
        for each in objects
        if each["kind"] == "Deployment" and each["metadata"]["name"].startswith("agl-worker")
    }
    assert arguments == {
        "agl-worker-cpu": ["--label", "gpu=no"],
        "agl-worker-gpu": ["--label", "gpu=yes", "--label", "a=b"],
    }


@needs_validators
@pytest.mark.parametrize("cloud", CLOUDS)
def test_whatever_a_cloud_s_files_refer_to_is_declared_in_them(tmp_path: Path, cloud: str) -> None:
    """The providers' schemas cannot be had without a network; names can be compared."""
    folder, files = written(tmp_path, "local", cloud)
    paths = [str(folder / path) for path in files if path.endswith(".tf")]
    parsed = in_environment(HCL, *paths)
    declared = set()
    for file in parsed:
        for block in file.get("variable", []):
            declared |= {f"var.{bare(name)}" for name in block}
        for kind, prefix in (("resource", ""), ("data", "data.")):
            for block in file.get(kind, []):
                declared |= {f"{prefix}{bare(type_)}.{bare(name)}" for type_, named in block.items() for name in named}
    text = "".join(re.sub(r"(?m)^\s*#.*", "", files[path]) for path in files if path.endswith(".tf"))
    providers = {"aws": "aws", "azure": "azurerm", "gcp": "google"}[cloud]
    named = set(re.findall(rf"(?<![\w.\"/-])((?:data\.)?(?:{providers}|random)_\w+\.\w+)", text))
    named |= set(re.findall(r"(?<![\w.])(var\.\w+)", text))
    assert named
    assert named <= declared
    assert {name for name in declared if name.startswith("var.")} == {name for name in named if name.startswith("var.")}


def bare(name: str) -> str:
    """A name without the quotes that a parser leaves."""
    return name.strip('"')


@needs_validators
@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_values_of_a_cloud_fit_the_chart(tmp_path: Path, cloud: str) -> None:
    folder, files = written(tmp_path, "local", cloud)
    own, chart = (yaml.safe_load(files[path]) for path in (f"{cloud}/values.yaml", "chart/values.yaml"))
    for table, settings in own.items():
        assert set(settings) <= set(chart[table]), table
    assert set(own["worker"]["pools"][0]) == set(chart["worker"]["pools"][0])
    rendered = in_environment(RENDER, str(folder / "chart"), json.dumps(own))
    server = next(text for path, text in rendered.items() if path.endswith("/server.yaml"))
    assert "secretKeyRef: {name: agl-store, key: uri}" in server
