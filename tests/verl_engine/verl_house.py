"""The table [engine] of a verl that runs on this machine's CPU, and the environment that its processes need."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OPTIONS = HERE / "cpu.toml"
PYTHON = Path(os.environ.get("AGL_VERL_PYTHON") or HERE.parents[1] / ".venv-verl" / "bin" / "python")
ENVIRONMENT = {
    "PYTHONPATH": str(HERE),
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform,cpu_backends",
    "VERL_PLATFORM": "cpu",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def verl_settings(workers: int) -> dict[str, Any]:
    options = tomllib.loads(OPTIONS.read_text())
    options |= {"python": str(PYTHON), "trainer": {"n_gpus_per_node": workers}}
    return {"name": "verl", "device": "cpu", "options": options}
