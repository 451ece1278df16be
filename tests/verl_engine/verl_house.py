"""The table [engine] of a verl that runs on this machine's CPU, and the environment that its processes need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("AGL_VERL_PYTHON") or HERE.parents[1] / ".venv-verl" / "bin" / "python")
ENVIRONMENT = {
    "PYTHONPATH": str(HERE),
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform,cpu_backends",
    "VERL_PLATFORM": "cpu",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def verl_settings(workers: int) -> dict[str, Any]:
    """FSDP2 over gloo, and a rollout server of transformers in each worker's place."""
    no_compiler = {"use_torch_compile": False}
    model = {"use_remove_padding": False, "override_config": {"attn_implementation": "sdpa"}}
    options = {
        "python": str(PYTHON),
        "actor_rollout_ref": {
            "model": model,
            "actor": {**no_compiler, "fsdp_config": no_compiler},
            "ref": {"fsdp_config": no_compiler},
            "rollout": {"name": "cpu"},
        },
        "trainer": {"n_gpus_per_node": workers},
        "ray_kwargs": {"ray_init": {"num_cpus": 8, "num_gpus": workers}},
    }
    return {"name": "verl", "device": "cpu", "options": options}
