"""Podman as tests of images need it: a store of its own, a base image made of Debian's packages, builds without network.

Bases of registries cannot be had everywhere, so what the Dockerfiles name is a root of Debian with its own Python, which has
that name in this store alone. Packages come from a folder of wheels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAMS = ("podman", "runc", "mmdebstrap")
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""Podman raises limits to its own, which needs a capability that root of a container does not have."""
BASE = """FROM scratch
ADD base.tar /
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && ln -s /usr/bin/python3 /usr/local/bin/python
"""
REPOSITORY = Path(__file__).parents[2]


def missing() -> str | None:
    """A sentence where images cannot be built here; else None."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(absent)} not installed: `make podman`"
    return None if os.geteuid() == 0 else "podman runs as root here"


class Podman:
    """Images and containers in a folder, which holds their layers, too."""

    def __init__(self, folder: Path) -> None:
        """folder: a new one."""
        self._folder = folder
        self._packages = folder / "packages"
        for name in ("packages", "wheels"):
            (folder / name).mkdir(parents=True)
        (folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /packages\n")
        (folder / "uv.toml").write_text('no-index = true\nfind-links = ["/packages"]\n')

    def run(self, *words: str, check: bool = True) -> str:
        """What `podman words…` printed."""
        done = self._done(*words)
        assert not check or done.returncode == 0, (
            f"podman {' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    def make_base(self, name: str) -> None:
        """Make an image of Debian with its own Python, under the name of the base that it stands for."""
        context = self._folder / "base"
        context.mkdir()
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        _run("mmdebstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(context / "base.tar"))
        (context / "Dockerfile").write_text(BASE)
        self.run("build", *LIMITS, "--network", "none", "--tag", name, str(context))

    def get_packages(self, *names: str) -> Path:
        """Fill the folder of wheels with these packages and all that they need; the wheel of agentlightning itself."""
        pip = sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", str(self._folder / "wheels"), str(REPOSITORY))
        (wheel,) = (self._folder / "wheels").iterdir()
        asked = [name.replace("agentlightning-gateway", str(wheel)) for name in names]
        versions = "--constraint", str(REPOSITORY / "requirements.lock")
        _run(*pip, "download", "--dest", str(self._packages), *versions, *asked)
        return wheel

    def build(self, project: Path, image: str) -> str:
        """Build deploy/IMAGE.Dockerfile of a project as its first lines say, without network; the image's name."""
        mounts = {self._packages: "/packages", self._folder / "pip.conf": "/etc/pip.conf"}
        mounts[self._folder / "uv.toml"] = "/etc/uv/uv.toml"
        file = project / "deploy" / f"{image}.Dockerfile"
        options = ["--format", "docker", "--network", "none", *LIMITS]
        options += ["--ignorefile", f"{file}.dockerignore", "--file", str(file), "--tag", f"bot-{image}"]
        options += [word for here, there in mounts.items() for word in ("--volume", f"{here}:{there}:ro")]
        self.run("build", *options, str(project))
        return f"bot-{image}"

    def start(self, image: str, *options: str) -> str:
        """Start a container as compose.yaml hardens it, without network; its id."""
        hardened = (
            "--read-only",
            "--cap-drop",
            "all",
            "--security-opt",
            "no-new-privileges",
            "--tmpfs",
            "/tmp:mode=1777",
        )
        return self.run("run", "--detach", "--network", "none", *hardened, *LIMITS, *options, image).strip()

    def log(self, container: str) -> str:
        """What a container printed."""
        done = self._done("logs", container)
        return done.stdout + done.stderr

    def healthy(self, container: str) -> bool:
        """True where the health check of the container's image passes now."""
        return self._done("healthcheck", "run", container).returncode == 0

    def close(self) -> None:
        """End every container, and take everything away."""
        self.run("rm", "--all", "--force", check=False)
        self.run("rmi", "--all", "--force", check=False)
        shutil.rmtree(self._folder)

    def _done(self, *words: str) -> subprocess.CompletedProcess[str]:
        places = "--root", str(self._folder / "root"), "--runroot", str(self._folder / "runroot")
        return subprocess.run(["podman", "--runtime", "runc", *places, *words], capture_output=True, text=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr[-3000:]}"
