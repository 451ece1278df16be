"""Which engine benchmarks/chaos.py runs: its table [engine], and its processes, by the roles that are killed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCAL = "[engine]\n"
VLLM = """
[engine.sampler]
type = "vllm"
python = "{python}"
arguments = ["--kv-cache-memory-bytes", "500000000"]
"""
VERL = """
[engine]
name = "verl"
device = "cpu"
dtype = "float32"
[engine.options]
python = "{python}"
[engine.options.trainer]
n_gpus_per_node = 2
"""


@dataclass(frozen=True)
class ChaosEngine:
    """An engine under chaos."""

    table: str
    """Of the run's configuration."""
    parts: Mapping[str, str]
    """By role, a word by which its processes are known: their module, their program, or the class of a Ray actor."""
    model_arguments: tuple[str, ...] = ()
    """Of the warm start."""
    unwatched: frozenset[str] = frozenset()
    """Roles whose processes nobody replaces where they only stand still for a while."""
    start_s: float = 90.0
    """The run's trainer.start_timeout_s where processes hang."""


def engine_named(name: str, python: Path | None = None) -> ChaosEngine:
    """local, vllm or verl; the last is run on this machine's CPU, with what tests/verl_engine has for that, two workers."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a run that is repeated adds in the same order
    learner = {"learner": "agentlightning.engines.local.learner"}
    if name == "vllm":
        python = python or ROOT / ".venv-vllm" / "bin" / "python"
        heads = ("--head-dim", "32")  # vLLM on a CPU takes no smaller ones
        return ChaosEngine(VLLM.format(python=python.absolute()), {"sampler": "agentlightning_vllm", **learner}, heads)
    if name == "verl":
        return _verl(python)
    if python is not None:
        sys.exit("--engine-python has no effect with --engine local; expected --engine vllm or verl")
    return ChaosEngine(LOCAL, {"sampler": "agentlightning.engines.local.sampler", **learner})


def _verl(python: Path | None) -> ChaosEngine:
    sys.path.append(str(ROOT / "tests" / "verl_engine"))
    from verl_house import ENVIRONMENT, OPTIONS, PYTHON

    os.environ.update(ENVIRONMENT)
    options = re.sub(r"^\[", "[engine.options.", OPTIONS.read_text(), flags=re.MULTILINE)
    parts = {
        "driver": "agentlightning.engines.verl.driver",
        "sampler": "ray::CpuServer",
        "learner": "ray::TrainingWorker",
    }
    parts |= {"node": "raylet", "gcs": "gcs_server"}
    table = VERL.format(python=(python or PYTHON).absolute()) + options
    return ChaosEngine(table, parts, unwatched=frozenset({"node", "gcs"}), start_s=240.0)
