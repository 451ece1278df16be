"""``agl deploy``: files that build images of a run and start them, for Docker, Compose, Kubernetes and three clouds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentlightning.errors import ConfigError

NEXT = {
    "docker": "docker build --file {to}/agent.Dockerfile . (each file's first lines say how)",
    "compose": "{to}/start.sh",
    "kubernetes": "{to}/kubernetes/README.md",
    "aws": "{to}/aws/README.md",
    "azure": "{to}/azure/README.md",
    "gcp": "{to}/gcp/README.md",
}


def deploy(
    target: Annotated[
        Literal["docker", "compose", "kubernetes", "aws", "azure", "gcp"],
        typer.Argument(help="Where it shall run. All have the images; the clouds have the cluster's objects, too."),
    ],
    config: Annotated[Path, typer.Argument(help="TOML file with the configuration, in the project's folder.")],
    to: Annotated[Path, typer.Option("--to", help="Folder for the files, inside the project's folder.")],
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there and differ.")] = False,
) -> None:
    """Write files that deploy a run: server, trainer and workers, with the agent's code and packages.

    Starts nothing and asks nobody. The files are yours: each choice is explained in them. They hold no secret.
    """
    from agentlightning.deploy.project import image_path, read_project
    from agentlightning.deploy.render import render, write_files

    project = read_project(config)
    folder = to.resolve()
    if not folder.is_relative_to(project.root) or folder == project.root:
        raise ConfigError(f"--to: expected a folder inside {project.root}, which images are built from, got {to}")
    files = render(project, target, image_path("--to", folder.relative_to(project.root)))
    changed = write_files(folder, files, force=force)
    for note in project.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{len(files)} files in {to}, {len(changed)} of them new or changed; next: {NEXT[target].format(to=to)}")
