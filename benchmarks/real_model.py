"""A pretrained model (SmolLM2-135M-Instruct) on word problems: ours beside TRL, plain transformers and a plain torch loop.

    python benchmarks/real_model.py [--quick] [--threads 2]

All sides have the same cores and the same tasks: 8 rollouts of each of 8 prompts a step, one update, one rate. Wall time,
medians; needs a quiet machine and at most a quarter of an hour. TRL gets an environment, .venv-trl, at the first run.

- step_over_trl: seconds of a step of TRL's GRPOTrainer over those of `agl train`, the first of each left out.
- memory_over_trl: peak of resident memory, summed over the processes, of `agl train` over TRL's, from start to end.
- success_minus_trl: greedy held-out success after the same rollouts, both by `agl eval`.
- sampler_over_transformers: the engine's sampler over HTTP against `generate`, tokens a second of one step's rollouts.
- learner_over_torch: the engine's learner against a loop of forward, backward and AdamW over the same padded rows.
- kl_per_token: KL between sampler and learner before the updates (k3), mean of the steps of `agl train`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE / "training"), str(HERE / "learning")]

import aiohttp  # noqa: E402
import torch  # noqa: E402
from claim import AGL, last_json, options, write_rows  # noqa: E402
from word_problems import MAX_TOKENS, messages_of  # noqa: E402
from work import row  # noqa: E402

from agentlightning.config.engine import EngineConfig  # noqa: E402
from agentlightning.demo.memory import PeakMemory  # noqa: E402
from agentlightning.demo.pretrained import pretrained_model  # noqa: E402
from agentlightning.demo.word_problems import sample  # noqa: E402
from agentlightning.engines.base import DEFAULT_POLICY, EngineSetup, make_engine  # noqa: E402
from agentlightning.rendering.renderer import Renderer  # noqa: E402
from agentlightning.training_types import Loss  # noqa: E402
from gpu import complete  # noqa: E402
from peers import install_peer  # noqa: E402

TRL = HERE.parent / ".venv-trl"
TASKS, GROUP, RATE = 8, 8, 3e-5
MICROBATCH = 16
"""Rows of TRL's and the loop's backward passes: more take more memory and are no faster on a CPU."""
CONFIG = """\
[model]
path = "{model}"
[agent]
run = "{agent}:solve"
workers = 1
[data]
train = "{folder}/train.jsonl"
[algorithm]
group_size = {group}
minibatches = 1
[trainer]
steps = {steps}
tasks_per_step = {tasks}
learning_rate = {rate}
final_learning_rate = 1.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two steps and one round: shows that it runs")
    parser.add_argument("--threads", type=int, default=2, help="cores that every side has [2]")
    given = parser.parse_args()
    model = pretrained_model()
    install_peer("TRL 1.16", TRL, HERE / "training" / "trl.lock", torch="2.13.0")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])  # of all processes that this one starts
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as name:
        figures = against_trl(model, Path(name), steps=2 if given.quick else 6, held_out=8 if given.quick else 200)
        figures |= asyncio.run(against_plain(model, Path(name), rounds=1 if given.quick else 5))
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))


def problems(split: Any, count: int) -> list[dict[str, Any]]:
    """Word problems of one calculation."""
    rng, found = random.Random(split), list[dict[str, Any]]()
    while len(found) < count:
        one = sample(rng, split)
        found += [one] if len(one["calculation"].split()) == 3 else []
    return found


# --- whole steps --------------------------------------------------------------------------------------------------------


def against_trl(model: Path, folder: Path, steps: int, held_out: int) -> dict[str, float]:
    tasks = problems("train", steps * TASKS)
    write_rows(folder / "train.jsonl", tasks)
    write_rows(folder / "heldout.jsonl", problems("test", held_out))
    values = {"model": model, "agent": HERE / "training" / "word_problems.py", "folder": folder, "group": GROUP}
    config = folder / "train.toml"
    config.write_text(CONFIG.format(**values, steps=steps, tasks=TASKS, rate=RATE))
    mine, our_mb, kl = train_ours(config, folder)
    theirs, their_mb = train_trl(model, folder, tasks, steps)
    checkpoint = max((folder / "runs").glob("*/checkpoints/step-*"))
    ours_success, trl_success = (success(config, folder, weights) for weights in (checkpoint, folder / "trl"))
    print(f"step: {mine:.1f} s, TRL {theirs:.1f} s; memory: {our_mb:.0f} MB, TRL {their_mb:.0f} MB")
    print(f"greedy held-out success: {ours_success:.3f}, TRL {trl_success:.3f}", flush=True)
    return {
        "step_over_trl": theirs / mine,
        "memory_over_trl": our_mb / their_mb,
        "success_minus_trl": ours_success - trl_success,
        "kl_per_token": kl,
    }


def train_ours(config: Path, folder: Path) -> tuple[float, float, float]:
    """Seconds of a step, megabytes, and the divergence of sampler and learner."""
    words = [*AGL, "train", config, "--runs", folder / "runs", "--store", f"sqlite:///{folder}/agl.db"]
    with subprocess.Popen(list(map(str, words)), stdout=sys.stderr) as process, PeakMemory(process.pid) as memory:
        process.wait()
    if process.returncode:
        sys.exit("agl train failed; its errors stand above")
    (metrics,) = (folder / "runs").glob("*/metrics.jsonl")
    rows = [one for one in map(json.loads, metrics.read_text().splitlines()) if one["kind"] == "step"]
    for one in rows:
        print(f"ours: {one['time/step_s']:.1f} s, reward {one['train/reward_mean']:.2f}", flush=True)
    gaps = [one["policy/sampler_gap"] for one in rows if "policy/sampler_gap" in one]
    return statistics.median(one["time/step_s"] for one in rows[1:]), memory.megabytes, statistics.fmean(gaps)


def train_trl(model: Path, folder: Path, tasks: list[dict[str, Any]], steps: int) -> tuple[float, float]:
    """Seconds of a step, and megabytes; the weights are in `trl`."""
    work = {
        "prompts": [messages_of(task["question"]) for task in tasks],
        "answers": [task["answer"] for task in tasks],
        "tasks": TASKS,
        "group": GROUP,
        "answer": MAX_TOKENS,
        "trl_rows": MICROBATCH,
        "learning_rate": RATE,
        "bf16": bfloat16(),
        "save": str(folder / "trl"),
    }
    command = [TRL / "bin" / "python", HERE / "training" / "trl_steps.py", model, json.dumps(work)]
    took = []
    with Child(command) as child, PeakMemory(child.process.pid) as memory:
        child.read()  # ready
        for _ in range(steps):
            report = child.ask("step")
            print(f"TRL: {report['step_s']:.1f} s, reward {report['reward']:.2f}", flush=True)
            took.append(report["step_s"])
        child.finish()
    return statistics.median(took[1:]), memory.megabytes


def success(config: Path, folder: Path, weights: Path) -> float:
    settings = {"model.path": weights, "data.val": folder / "heldout.jsonl"}
    words = [*AGL, "eval", config, *options(settings), "--runs", folder / "eval", "--store", "memory://"]
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit("agl eval failed; its errors stand above")
    return float(last_json(done.stdout)["greedy"])


def bfloat16() -> bool:
    """Whether the processor computes in bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


# --- the parts ----------------------------------------------------------------------------------------------------------


async def against_plain(model: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Both sides' rounds in turns; the first does not count."""
    renderer, rng = Renderer(model), random.Random(0)
    texts = [renderer.render(messages_of(task["question"]), None, True) for task in problems("train", TASKS)]
    prompts = [renderer.encode(text) for text in texts]
    drawn = [(prompt, rng.choices(prompt, k=MAX_TOKENS)) for prompt in prompts for _ in range(GROUP)]
    sequences = [row([*prompt, *completion], [(len(prompt), len(prompt) + MAX_TOKENS)]) for prompt, completion in drawn]
    work = {"prompts": prompts, "group": GROUP, "answer": MAX_TOKENS, "rows": drawn, "microbatch": MICROBATCH}
    work["bf16"] = bfloat16()
    seen: defaultdict[str, list[float]] = defaultdict(list)
    engine = make_engine(
        EngineSetup(model=model, work_dir=folder / "engine", config=EngineConfig(), learning_rate=RATE)
    )
    command = [sys.executable, HERE / "training" / "plain_steps.py", model, json.dumps(work)]
    try:
        served = (await engine.start())[DEFAULT_POLICY]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            with Child(command) as child:
                for _ in range(rounds + 1):
                    seen["generate"].append(child.ask("sample")["seconds"])
                    started = time.perf_counter()
                    await asyncio.gather(*(complete(served, http, prompt, MAX_TOKENS) for prompt, _ in drawn))
                    sampled = time.perf_counter()
                    await engine.forward_backward(sequences, Loss())
                    await engine.optim_step(RATE, 1.0)
                    seen["sampler"].append(sampled - started)
                    seen["learner"].append(time.perf_counter() - sampled)
                    seen["torch"].append(child.ask("learn")["seconds"])
                    await engine.publish(len(seen["torch"]))  # or the sampler would know the prompts already
                    print({name: round(times[-1], 2) for name, times in seen.items()}, flush=True)
    finally:
        await engine.close()
    medians = {name: statistics.median(times[1:]) for name, times in seen.items()}
    return {
        "sampler_over_transformers": medians["generate"] / medians["sampler"],
        "learner_over_torch": medians["torch"] / medians["learner"],
    }


class Child:
    """A process that answers each line of its stdin with a line of JSON."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args!r:.200} ended; its errors stand above")
        return dict(json.loads(line))

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.read()

    def finish(self) -> None:
        """End its input and wait for what it does then."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    main()
