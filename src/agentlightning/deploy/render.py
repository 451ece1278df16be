"""render: the files of a deployment, as texts by their paths; the same project gives the same bytes.

Driven by `agl deploy`. Templates lie in `templates/`, with `[[ … ]]` and `[% … %]` in place of Jinja's braces, which
Terraform and shells use themselves. Commands of containers are made here, once for every target, without secrets: those come
by the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from agentlightning import __version__
from agentlightning.config.engine import FsdpLearner, VllmSampler
from agentlightning.deploy.project import UV_VERSION, Project
from agentlightning.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from jinja2 import Environment

Target = Literal["docker", "compose", "kubernetes", "aws", "azure", "gcp"]
TARGETS: tuple[str, ...] = get_args(Target)
CLOUDS = ("aws", "azure", "gcp")
TEMPLATES = Path(__file__).parent / "templates"
IMAGES: Mapping[str, str] = MappingProxyType(
    {
        "python": "docker.io/library/python:3.12.12-slim-bookworm",
        "node": "docker.io/library/node:22.21.1-bookworm-slim",
        "postgres": "docker.io/library/postgres:17.6-bookworm",
        "cnpg": "ghcr.io/cloudnative-pg/postgresql:17.6",
        "vllm": "docker.io/vllm/vllm-openai:v0.32.0",
    }
)
"""Bases by tag: no registry is asked for digests, so that the same project gives the same bytes anywhere."""

PORTS: Mapping[str, int] = MappingProxyType(
    {"server": 8088, "metrics": 8089, "sampler": 9000, "vllm": 8000, "console": 7860}
)
DRAIN_TIMEOUT_S = 60
"""Time for agents to end by themselves when their worker is told to; whoever kills it waits 15 s more."""
AGENT_USER = "10002"
"""Number of the user that agents run as in Compose's containers of workers."""
KEYS_FILE = "/etc/agl/keys.toml"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names at which the parts of a deployment find each other."""

    server: str
    trainer: str
    vllm: str


COMPOSE_HOSTS = Hosts(server="server", trainer="trainer", vllm="vllm")
COMPOSE_FILES = {
    "compose.yaml": "compose/compose.yaml",
    "start.sh": "compose/start.sh",
    ".env.example": "compose/env.example",
    "keys.toml": "docker/keys.toml",
}
CLUSTER_HOSTS = Hosts(server="agl-server", trainer="agl-trainer", vllm="agl-vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The blanks of the cluster's objects that differ by target."""

    folder: str = "kubernetes"
    operator: bool = False
    """True where an operator runs PostgreSQL in the cluster; else the cloud does."""
    store: str = "agl-store"
    """Secret with the store's URL as `uri`."""
    gpu_nodes: str = "{pool: gpu}"
    general_nodes: str = "{pool: general}"
    storage_class: str = "null"
    annotations: str = "{}"
    """Of the trainer's service account: how Azure gives it an identity."""
    env_from: str = "[]"
    """Secrets whose entries become the trainer's variables."""


PLACES = {
    "kubernetes": Place(operator=True, store="agl-postgres-app", gpu_nodes="{}", general_nodes="{}"),
    "aws": Place(folder="aws/kubernetes", storage_class="gp3"),
    "azure": Place(
        folder="azure/kubernetes",
        storage_class="managed-csi-premium",
        annotations="{azure.workload.identity/client-id: CLIENT_ID}",
    ),
    "gcp": Place(
        folder="gcp/kubernetes", storage_class="premium-rwo", env_from="[{secretRef: {name: agl-checkpoints}}]"
    ),
}


def render(project: Project, target: Target, folder: str) -> dict[str, str]:
    """The files of a target by their paths in `folder`, which is itself a path in the project.

    Every target has the images; a cloud has the cluster's objects, too. MissingExtraError if the template engine is missing.
    """
    engine = _environment()
    # Every target has the same images: what they run by default is overridden where hosts have other names.
    names = _names(project, folder, COMPOSE_HOSTS)
    files = {
        f"{image}.Dockerfile": _text(engine, f"docker/{image}.Dockerfile", names) for image in names["image_names"]
    }
    for image in names["image_names"]:
        withheld = project.withheld if image == "agent" else ()
        ignored = _text(engine, "docker/dockerignore", {**names, "withheld": withheld})
        files[f"{image}.Dockerfile.dockerignore"] = ignored
    files |= {".gitignore": _text(engine, "docker/gitignore", names), "pin.sh": _text(engine, "docker/pin.sh", names)}
    if target == "compose":
        files |= {path: _text(engine, template, names) for path, template in COMPOSE_FILES.items()}
    if (place := PLACES.get(target)) is not None:
        names = {**_names(project, folder, CLUSTER_HOSTS), "place": place}
        files |= _cluster(engine, names, place)
        if target in CLOUDS:
            files |= {f"{target}/{name}": _text(engine, f"{target}/{name}", names) for name in ("README.md", "main.tf")}
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
    engine.filters |= {"json": json.dumps, "words": _words, "escaped": _escaped, "literal": _literal}
    return engine


def _names(project: Project, folder: str, hosts: Hosts) -> dict[str, Any]:
    """Everything that templates may name."""
    config, external = project.config, project.external_hosts
    sampler = f"{hosts.vllm}:{PORTS['vllm']}" if project.uses_vllm else f"{hosts.trainer}:{PORTS['sampler']}"
    return {
        "sampler_key": project.sampler_key,
        "sampler_hosts": [sampler],
        "external": external,
        "folder": folder,
        "context": "/".join(".." for _ in Path(folder).parts),
        "name": project.name,
        "config_file": project.config_file,
        "version": __version__,
        "wheel": f"agentlightning_gateway-{__version__}-py3-none-any.whl",
        "uv_version": UV_VERSION,
        "images": IMAGES,
        "dependencies": project.dependencies,
        "node": project.node,
        "jobs": config.sandbox.type == "kubernetes",
        "model": project.model,
        "extras": project.trainer_extras,
        "vllm": project.uses_vllm,
        "gpus": config.engine.learner.processes if isinstance(config.engine.learner, FsdpLearner) else 1,
        "workers": max(config.agent.workers, 1),
        "concurrency": config.agent.concurrency,
        "trainer_keys": project.trainer_keys,
        "asked_keys": sorted({*external, *project.trainer_keys}),
        "image_names": ["server", "agent", "trainer", *(["vllm"] if project.uses_vllm else [])],
        "drain_s": DRAIN_TIMEOUT_S,
        # A function agent runs in its worker, and a sandbox has a user of its own.
        "agent_user": []
        if config.agent.run is not None or config.sandbox.type != "none"
        else ["--agent-user", AGENT_USER],
        "sampler_app": hosts.vllm if project.uses_vllm else hosts.trainer,
        "ports": PORTS,
        "commands": _commands(project, hosts),
    }


def _commands(project: Project, hosts: Hosts) -> dict[str, list[str]]:
    """Words of our own command line that containers run."""
    config, url = project.config, f"http://{hosts.server}:{PORTS['server']}"
    everywhere = ("--host", "0.0.0.0")
    settings = ["agent.workers=0", f"engine.key_env={project.sampler_key}"]
    if project.uses_vllm:  # the whole table: servers that run elsewhere have none of the settings of those started here
        urls = f'["http://{hosts.vllm}:{PORTS["vllm"]}"]'
        settings += [f'engine.sampler={{type="vllm_server", urls={urls}, weights="http://{hosts.trainer}"}}']
    else:
        settings += [f"engine.listen=0.0.0.0:{PORTS['sampler']}"]
        settings += [f'engine.advertise=["http://{hosts.trainer}:{PORTS["sampler"]}"]']
    run = ("--run", project.name)  # starts the run, and goes on with it when the container is started again
    worker = ["agl", "worker", project.agent, "--server", url, *run, "--concurrency", str(config.agent.concurrency)]
    worker += ["--drain-timeout", str(DRAIN_TIMEOUT_S), *_repeated("--reward", project.rewards)]
    own = config.engine.sampler.arguments if isinstance(config.engine.sampler, VllmSampler) else ()
    ports = ("--port", str(PORTS["server"]), "--metrics-port", str(PORTS["metrics"]))
    return {
        "server": ["agl", "serve", *everywhere, *ports, "--external-keys", KEYS_FILE],
        "trainer": [
            *("agl", "train", project.config_file, *run, "--server", url, "--runs", "/runs"),
            *_repeated("--set", settings),
        ],
        "worker": worker,
        "console": ["agl", "console", "--server", url, *everywhere, "--port", str(PORTS["console"])],
        "vllm": [
            *("--model", config.model.path if project.model is None else f"/app/{project.model}"),
            *(*everywhere, "--port", str(PORTS["vllm"]), "--enable-scale-out"),
            *("--logprobs-mode", "processed_logprobs", "--structured-outputs-config", '{"backend": "guidance"}'),
            *("--worker-extension-cls", "agentlightning_vllm.worker.WeightsWorker"),
            *("--weight-transfer-config", '{"backend": "agentlightning"}', *own),
        ],
    }


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _cluster(engine: Environment, names: dict[str, Any], place: Place) -> dict[str, str]:
    """The objects of a cluster, for `kubectl apply --kustomize`."""
    left_out = ("kustomization.yaml", "README.md", *(() if names["vllm"] else ("vllm.yaml",)))
    left_out += () if place.operator else ("postgres.yaml",)
    found = sorted(path.name for path in (TEMPLATES / "kubernetes").iterdir())
    manifests = [name for name in found if name not in left_out]
    names = {**names, "keys_file": _text(engine, "docker/keys.toml", names), "manifests": manifests}
    written = [*manifests, "kustomization.yaml", "README.md"]
    return {f"{place.folder}/{name}": _text(engine, f"kubernetes/{name}", names) for name in written}


def _text(engine: Environment, template: str, names: Mapping[str, Any]) -> str:
    return engine.get_template(template).render(names)


def _words(words: Sequence[str], indent: int) -> str:
    """Words as a list of YAML."""
    return "\n".join(f"{' ' * indent}- {_quoted(word)}" for word in words)


def _quoted(word: str) -> str:
    """A text of YAML in double quotes. JSON's would do, but for what it writes of signs beyond its \\uXXXX: a pair."""
    escaped = re.sub(
        r"[^\x20-\x7e]", lambda sign: f"\\U{ord(sign[0]):08x}", word.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def _escaped(words: Sequence[str]) -> list[str]:
    """Words for Compose, which takes `$` for a variable of its own unless it is doubled."""
    return [word.replace("$", "$$") for word in words]


def _literal(text: str, indent: int) -> str:
    """A text of several lines in YAML."""
    return "|\n" + "\n".join(f"{' ' * indent}{line}".rstrip() for line in text.rstrip("\n").split("\n"))


def write_files(folder: Path, files: Mapping[str, str], *, force: bool = False) -> list[str]:
    """Write the files and return the paths of those that are new or changed; scripts can be executed.

    Whoever gets the files owns them: where one is there with other contents, ConfigError names it and nothing is written,
    unless `force`.
    """
    changed = [path for path, text in files.items() if _text_of(folder / path) != text]
    theirs = [path for path in changed if (folder / path).exists()]
    if theirs and not force:
        raise ConfigError(
            f"--to: {folder / theirs[0]} is there and is not what would be written"
            f"{f', as are {len(theirs) - 1} more' if theirs[1:] else ''}; keep it elsewhere, or write over it with --force"
        )
    for path in changed:
        file = folder / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{file.name}.tmp")  # a file is whole, or not there
            temporary.write_text(files[path], encoding="utf-8", newline="\n")
            temporary.chmod(0o755 if path.endswith(".sh") else 0o644)
            temporary.replace(file)
        except OSError as cause:
            raise ConfigError(f"--to: {file} cannot be written: {cause.strerror}") from cause
    return changed


def _text_of(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return None
