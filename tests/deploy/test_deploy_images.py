"""The images of `agl deploy` are built by podman from a local root without network, and run so, without root, read-only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import podman_images
import pytest
from command_line import until
from deployed_project import make_project
from podman_images import Podman

from agentlightning.deploy.project import UV_VERSION, read_project
from agentlightning.deploy.render import IMAGES, render, write_files

# 6 minutes, most of them for packages; several times as much on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    if reason := podman_images.missing():
        pytest.skip(reason)
    opened = Podman(tmp_path_factory.mktemp("podman"))
    try:
        opened.make_base(IMAGES["python"])
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def project(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the files of `agl deploy docker`, and the wheel where they look for it."""
    config = make_project(tmp_path_factory.mktemp("project") / "bot")
    write_files(config.parent / "deploy", render(read_project(config), "compose", "deploy"))
    wheel = podman.get_packages("agentlightning-gateway[server,postgres,console]", "httpx", f"uv=={UV_VERSION}")
    wheels = config.parent / "deploy" / "wheels"
    wheels.mkdir()
    (wheels / wheel.name).write_bytes(wheel.read_bytes())
    return config.parent


def test_the_agents_image_holds_the_agent_and_neither_tasks_nor_torch(podman: Podman, project: Path) -> None:
    image = podman.build(project, "agent")
    look = (
        "import importlib.util as i, json, os; print(json.dumps([sorted(os.listdir()), i.find_spec('torch') is None]))"
    )
    shown = podman.run("run", "--rm", "--network", "none", *podman_images.LIMITS, image, "python", "-c", look)
    files, without_torch = json.loads(shown)
    assert files == ["agent.py", "deploy", "requirements.txt", "reward.py"]
    assert without_torch
    worker = podman.start(image)  # its command finds the agent, and no server
    assert podman.run("wait", worker).strip() != "0"
    assert "http://server:8088" in podman.log(worker)


def test_the_servers_image_serves_without_network_root_or_a_file_system_to_write_to(
    podman: Podman, project: Path
) -> None:
    image = podman.build(project, "server")
    keys = f"{project / 'deploy' / 'keys.toml'}:/etc/agl/keys.toml:ro"
    values = "AGL_STORE=sqlite:////tmp/agl.db", f"AGL_SERVER_KEY={'k' * 24}", f"SAMPLER_KEY={'s' * 24}"
    options = [word for value in values for word in ("--env", value)]
    server = podman.start(image, "--volume", keys, *options)
    until(lambda: podman.healthy(server), "the health check passes")
    assert podman.run("exec", server, "id", "--user").strip() == "10001"
    assert "lo:" in (links := podman.run("exec", server, "cat", "/proc/net/dev"))
    assert "eth" not in links
    with pytest.raises(AssertionError, match="Read-only file system"):
        podman.run("exec", server, "touch", "/opt/venv/new")
    podman.run("kill", "--signal", "TERM", server)
    assert podman.run("wait", server).strip() == "0"
