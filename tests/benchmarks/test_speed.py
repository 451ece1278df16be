"""The benchmarks of speed run from end to end in their quick form and print every figure; `drift.py` is exact."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("wrk", "nginx") if shutil.which(name) is None]
POSTGRES = shutil.which("postgres") or next(iter(Path("/usr/lib/postgresql").glob("*/bin/postgres")), None)
GATEWAY = {
    *("nginx_rps", "text_rps", "token_rps", "token_over_nginx", "added_ms_p50", "ttft_added_ms_p50"),
    *("rss_growth_mb_per_100k", "text_cpu_ms_per_call", "cpu_ms_per_call"),
}
PEER_FIGURES = {
    "gateway.py": {"litellm_rps", "text_over_litellm", "token_over_litellm"},
    "store.py": {f"{kind}_over_v03{memory}" for kind, memory in (("http_spans", ""), ("http_lists", ""))}
    | {"sqlite_spans_over_v03_memory", "sqlite_lists_over_v03_memory"},
    "tracing.py": {"agentops_added_ms", "ours_over_agentops", "agentops_added_wall_ms"},
}
"""Figures that are null where the peer is not installed."""
PEERS = {"gateway.py": "litellm", "store.py": "agentlightning-v03", "tracing.py": "agentops"}
FIGURES = {
    "gateway.py": GATEWAY,
    "store.py": {"claim_1m_over_1k", "bytes_over_whole_prompts"},
    "tracing.py": {"added_ms", "noise_ms", "added_wall_ms", "noise_wall_ms", "openinference_added_ms"},
    "training.py": {"merged_over_transition", "tree_over_merged", "tree_cost_spread"},
    "gpu.py": {f"local_{name}" for name in ("sampled_tokens_per_s", "learner_tokens_per_s", "publish_s", "mfu")},
    "scale.py": {
        *("agents", "calls_per_s", "added_p50_ms", "added_p99_ms", "rss_mb_per_agent", "rollouts_per_s"),
        *("added_p99_growth", "cpu_ms"),
    },
}
OPTIONS = {"gpu.py": ["--size", "tiny", "--device", "cpu", "--rounds", "1"]}


def run(name: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {key: value for key, value in os.environ.items() if key != "AGL_DATA"} | environment
    command = [sys.executable, f"benchmarks/{name}", *options]
    return subprocess.run(command, cwd=REPOSITORY, env=known, capture_output=True, text=True, timeout=880, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gateway.py", marks=pytest.mark.skipif(bool(MISSING), reason="needs wrk and nginx")),
        *("store.py", "tracing.py", "training.py", "gpu.py"),
        pytest.param("scale.py", marks=pytest.mark.skipif(POSTGRES is None, reason="no PostgreSQL")),
    ],
)
def test_a_quick_run_prints_every_figure(name: str) -> None:
    figures = last_line(run(name, *OPTIONS.get(name, ["--quick"])))
    optional = PEER_FIGURES.get(name, set())
    assert figures.keys() >= FIGURES[name] | optional
    assert all(figures[one] is not None for one in FIGURES[name])
    if name in PEERS and not (REPOSITORY / f".venv-{PEERS[name]}").exists():
        assert {one for one in optional if figures[one] is not None} == set()
    if name == "training.py":  # what merging and trees save is arithmetic: a short run on a busy machine shows it, too
        assert min(figures["merged_over_transition"], figures["tree_over_merged"]) > 1.5
    if name == "store.py":
        assert 0.1 < figures["bytes_over_whole_prompts"] < 0.5
    if name == "gateway.py":
        assert 0 < figures["token_rps"] < figures["nginx_rps"]
        assert figures["cpu_ms_per_call"] > 0
    if name == "scale.py":
        few, many = figures["measured"]
        assert (few["agents"], many["agents"], figures["lost"]) == (4, 16, 0)
        assert many["rollouts_per_s"] == pytest.approx(many["calls_per_s"] / 4, rel=0.05)


def test_a_run_without_its_tools_says_which_are_missing() -> None:
    done = run("gateway.py", "--quick", PATH="/nowhere")
    assert done.returncode == 1
    assert "wrk and nginx: not found" in done.stderr


def test_with_the_graph_every_prompt_continues_and_without_it_most_do_not() -> None:
    figures = last_line(run("drift.py", "--conversations", "2", "--noise", "0.2"))
    assert figures["exact_share"] == 1.0
    assert figures["retokenised_exact_share"] < 0.5
    assert figures["forks_by_cause"] == figures["real_templates"] == {}
    assert 2 * 4 * 3 <= figures["calls"] <= 2 * 4 * 9
