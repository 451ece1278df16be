"""render: the files of a deployment, as texts by their paths; the same project gives the same bytes.

Driven by `agl deploy`. Templates are beside this file, with `[[ … ]]` and `[% … %]` in place of Jinja's braces, which Helm
and Prometheus have a use for themselves. Writes nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from agentlightning.config.engine import FsdpLearner
from agentlightning.deploy import commands
from agentlightning.deploy.commands import Hosts
from agentlightning.deploy.dashboard import dashboard
from agentlightning.deploy.dependencies import UV_VERSION
from agentlightning.deploy.manifests import ChartValues, PlainValues
from agentlightning.deploy.project import Project
from agentlightning.errors import MissingExtraError

if TYPE_CHECKING:
    from jinja2 import Environment

Target = Literal["docker", "compose", "kubernetes", "aws", "azure", "gcp"]
TARGETS: tuple[str, ...] = get_args(Target)
CLOUDS = ("aws", "azure", "gcp")
TEMPLATES = Path(__file__).parent / "templates"
IMAGES = {
    "python": "docker.io/library/python:3.12.12-slim-bookworm",
    "node": "docker.io/library/node:22.21.1-bookworm-slim",
    "postgres": "docker.io/library/postgres:17.6-bookworm",
    "cnpg": "ghcr.io/cloudnative-pg/postgresql:17.6",
    "vllm": "docker.io/vllm/vllm-openai:v0.32.0",
    "prometheus": "docker.io/prom/prometheus:v3.5.0",
    "grafana": "docker.io/grafana/grafana:12.1.1",
}
"""Bases by tag: no registry is asked for digests, so that the same project gives the same bytes anywhere."""
COMPOSE_HOSTS = Hosts(server="server", trainer="trainer", vllm="vllm")
CLUSTER_HOSTS = Hosts(server="agl-server", trainer="agl-trainer", vllm="agl-vllm")


def render(project: Project, target: Target, folder: str) -> dict[str, str]:
    """The files of a target by their paths in `folder`, which is itself a path in the project.

    Every target has the images; a cloud has the chart, too. MissingExtraError where the template engine is not installed.
    """
    engine = _environment()
    clustered = target not in ("docker", "compose")
    names = _names(project, folder, CLUSTER_HOSTS if clustered else COMPOSE_HOSTS)
    # Of every target the same images: what they run by default is overridden where hosts have other names.
    files = _images(engine, project, _names(project, folder, COMPOSE_HOSTS))
    if target == "compose":
        files |= _compose(engine, names)
    if clustered:
        files |= _cluster(engine, project, names)
    if target in CLOUDS:
        files |= {f"{target}/{path.name}": _text(engine, f"{target}/{path.name}", names) for path in _templates(target)}
    return dict(sorted(files.items()))


def _environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError as cause:
        raise MissingExtraError(str(cause.name), "deploy") from cause
    engine = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        variable_start_string="[[",
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        comment_start_string="[#",
        comment_end_string="#]",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    engine.filters |= {
        "json": json.dumps,
        "words": _words,
        "escaped": _escaped,
        "folded": _folded,
        "literal": _literal,
    }
    return engine


def _names(project: Project, folder: str, hosts: Hosts) -> dict[str, Any]:
    """Everything that templates may name."""
    config, external = project.config, project.external_hosts
    asked = sorted({*external, *project.trainer_keys})
    found = version("agentlightning")
    sampler_hosts = hosts.samplers(project)
    keys = {"sampler_key": project.sampler_key, "sampler_hosts": sampler_hosts, "external": external}
    return keys | {
        "folder": folder,
        "context": "/".join(".." for _ in Path(folder).parts),
        "name": project.name,
        "config_file": project.config_file,
        "version": found,
        "wheel": f"agentlightning-{found}-py3-none-any.whl",
        "uv_version": UV_VERSION,
        "images": IMAGES,
        "dependencies": project.dependencies,
        "node": project.node,
        "jobs": config.sandbox.type == "kubernetes",
        "model": project.model,
        "extras": project.trainer_extras,
        "vllm": project.uses_vllm,
        "vllm_side": "vllm_side",
        "ray": project.uses_ray,
        "ray_workers": 1,
        "gpus": config.engine.learner.processes if isinstance(config.engine.learner, FsdpLearner) else 1,
        "workers": max(config.agent.workers, 1),
        "concurrency": config.agent.concurrency,
        "trainer_keys": project.trainer_keys,
        "asked_keys": asked,
        "image_names": ["server", "agent", "trainer", *(["vllm"] if project.uses_vllm else [])],
        "drain_s": commands.DRAIN_TIMEOUT_S,
        "queue_query": " + ".join(f'max(agl_store_{kind}{{run="{project.name}"}})' for kind in ("queued", "running")),
        "sampler_app": hosts.vllm if project.uses_vllm else hosts.trainer,
        "ports": {
            "server": commands.SERVER_PORT,
            "metrics": commands.METRICS_PORT,
            "sampler": commands.SAMPLER_PORT,
            "vllm": commands.VLLM_PORT,
            "console": commands.CONSOLE_PORT,
        },
        "commands": {
            "server": commands.server_command(),
            "trainer": commands.trainer_command(project, hosts),
            "worker": commands.worker_command(project, hosts),
            "console": commands.console_command(hosts),
            "vllm": commands.vllm_arguments(project),
        },
    }


def _images(engine: Environment, project: Project, names: Mapping[str, Any]) -> dict[str, str]:
    files = {}
    for image in names["image_names"]:
        file = f"{image}.Dockerfile"
        files[file] = _text(engine, f"docker/{file}", names)
        withheld = project.withheld if image == "agent" else ()
        files[f"{file}.dockerignore"] = _text(engine, "docker/dockerignore", {**names, "withheld": withheld})
    return files | {
        ".gitignore": _text(engine, "docker/gitignore", names),
        "pin.sh": _text(engine, "docker/pin.sh", names),
    }


def _compose(engine: Environment, names: Mapping[str, Any]) -> dict[str, str]:
    places = {
        "compose.yaml": "compose/compose.yaml",
        "start.sh": "compose/start.sh",
        ".env.example": "compose/env.example",
        "prometheus.yaml": "compose/prometheus.yaml",
        "keys.toml": "docker/keys.toml",
        "grafana/provisioning/datasources/prometheus.yaml": "compose/grafana/datasource.yaml",
        "grafana/provisioning/dashboards/agentlightning.yaml": "compose/grafana/dashboards.yaml",
    }
    files = {path: _text(engine, template, names) for path, template in places.items()}
    return files | {"grafana/dashboards/agentlightning.json": dashboard(str(names["name"]))}


def _cluster(engine: Environment, project: Project, names: Mapping[str, Any]) -> dict[str, str]:
    """The chart, and the same objects with its default values."""
    names = {**names, "keys_file": _text(engine, "docker/keys.toml", names)}
    values = _text(engine, "kubernetes/values.yaml", names)
    panels = dashboard(project.name)
    left_out = () if project.uses_vllm else ("vllm.yaml",)
    manifests = [path.name for path in _templates("kubernetes/manifests") if path.name not in left_out]
    files = {
        "chart/Chart.yaml": _text(engine, "kubernetes/Chart.yaml", names),
        "chart/README.md": _text(engine, "kubernetes/README.md", names),
        "chart/values.yaml": values,
        "chart/files/dashboard.json": panels,
        "kustomize/namespace.yaml": _text(engine, "kubernetes/namespace.yaml", names),
    }
    kinds: dict[str, ChartValues | PlainValues] = {
        "chart/templates": ChartValues(),
        "kustomize": PlainValues(_yaml(values), _literal(panels, 4)),
    }
    for place, source in kinds.items():
        for manifest in manifests:
            text = _text(engine, f"kubernetes/manifests/{manifest}", _called(engine, names, source))
            files[f"{place}/{manifest}"] = text
    listed = {**names, "manifests": ["namespace.yaml", *manifests]}
    return files | {"kustomize/kustomization.yaml": _text(engine, "kubernetes/kustomization.yaml", listed)}


def _called(engine: Environment, names: Mapping[str, Any], source: ChartValues | PlainValues) -> dict[str, Any]:
    """The names of a template of Kubernetes objects, with where it has its values from."""
    functions = {name: getattr(source, name) for name in ("v", "block", "when", "each", "dashboard_text")}
    own: dict[str, Any] = {**names, **functions}
    own["ray_pod"] = lambda kind: _text(engine, "kubernetes/ray_pod.yaml", {**own, "kind": kind}).rstrip("\n")
    return own


def _templates(folder: str) -> Sequence[Path]:
    return sorted(path for path in (TEMPLATES / folder).iterdir() if path.is_file())


def _text(engine: Environment, template: str, names: Mapping[str, Any]) -> str:
    return engine.get_template(template).render(names)


def _yaml(text: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as cause:
        raise MissingExtraError(str(cause.name), "deploy") from cause
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def _words(words: Sequence[str], indent: int) -> str:
    """Words as a list of YAML, in quotes where YAML would take them for something else than text."""
    plain = re.compile(r"(--)?[A-Za-z/][A-Za-z0-9_./-]*")
    reserved = ("true", "false", "null", "yes", "no", "on", "off", "y", "n", "~")
    return "\n".join(
        f"{' ' * indent}- {word if plain.fullmatch(word) and word.lower() not in reserved else _quoted(word)}"
        for word in words
    )


def _quoted(word: str) -> str:
    """A text of YAML in double quotes. JSON's would do, but for what it writes of signs beyond its \\uXXXX: a pair."""
    escaped = re.sub(
        r"[^\x20-\x7e]", lambda sign: f"\\U{ord(sign[0]):08x}", word.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def _escaped(words: Sequence[str]) -> list[str]:
    """Words for Compose, which takes `$` for a variable of its own unless it is doubled."""
    return [word.replace("$", "$$") for word in words]


def _folded(words: Sequence[str], indent: int) -> str:
    """A command for a shell in YAML, an option on each line, which YAML folds into one."""
    text = "".join(
        f"\n{' ' * indent}{word}" if word.startswith("--") else f" {word}" for word in map(shlex.quote, words)
    )
    return f">-\n{' ' * indent}{text.lstrip()}"


def _literal(text: str, indent: int) -> str:
    """A text of several lines in YAML."""
    return "|\n" + "\n".join(f"{' ' * indent}{line}".rstrip() for line in text.rstrip("\n").split("\n"))
