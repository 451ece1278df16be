"""``agl deploy``: files that build images of a run and start them, for Docker, Compose, Kubernetes and three clouds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

import agentlightning
from agentlightning.errors import ConfigError


def deploy(
    target: Annotated[
        Literal["docker", "compose", "kubernetes", "aws", "azure", "gcp"],
        typer.Argument(help="Where it shall run. All have the images; the clouds have the cluster's objects, too."),
    ],
    config: Annotated[Path, typer.Argument(help="TOML file with the configuration, in the project's folder.")],
    to: Annotated[Path, typer.Option("--to", help="Folder for the files, inside the project's folder.")],
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there and differ.")] = False,
) -> None:
    """Write files that deploy a run, and print the next commands.

    Server, trainer and workers get images, with the agent's code and packages. Starts nothing and asks nobody. The files are
    yours: each choice is explained in them. They hold no secret.
    """
    from agentlightning.deploy.project import image_path, read_project
    from agentlightning.deploy.render import render, write_files

    project = read_project(config)
    folder = to.resolve()
    if not folder.is_relative_to(project.root) or folder == project.root:
        raise ConfigError(f"--to: expected a folder inside {project.root}, which images are built from, got {to}")
    where = image_path("--to", folder.relative_to(project.root))
    files = render(project, target, where)
    changed = write_files(folder, files, force=force)
    for note in project.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{len(files)} files in {to}, {len(changed)} of them new or changed; next:")
    commands = [] if project.root == Path.cwd() else [f"cd {shlex.quote(str(project.root))}"]
    if target in ("docker", "compose"):
        commands.append(f"pip wheel --no-deps --wheel-dir {where}/wheels {_checkout()}")
    if target == "docker":
        images = [name.removesuffix(".Dockerfile") for name in files if name.endswith(".Dockerfile")]
        commands += [f"docker build --file {where}/{one}.Dockerfile --tag {project.name}-{one} ." for one in images]
    else:
        commands.append(f"{where}/start.sh" if target == "compose" else f"less {where}/{target}/README.md")
    for command in commands:
        typer.echo(f"  {command}")


def _checkout() -> str:
    """The checkout that this package runs from, of which images get a wheel: no index has it."""
    checkout = Path(agentlightning.__file__).parents[2]
    return shlex.quote(str(checkout)) if (checkout / "pyproject.toml").is_file() else "PATH-OF-THE-CHECKOUT"
