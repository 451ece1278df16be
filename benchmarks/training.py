"""Training against TRL's GRPOTrainer, and what merging and prefix trees save.

    python benchmarks/training.py [--quick]

The same model of 4.95 million parameters, the same prompts and lengths of answers, one thread each, no HTTP on either
side; CPU seconds of a process, medians of 5 steps taken in turns.

- ours_over_trl_step: one whole GRPO step of 4 tasks x 8 rollouts, prompt 256, answer 64: sample, advantages, gradient,
  AdamW, and for ours the weights' way from the learner to the sampler. TRL samples and learns on one copy of the weights.
- ours_over_trl_train: the same without sampling.
- merged_over_transition: gradient of three-turn rollouts of 200 + 3 x 30 tokens, one row a rollout against one row a call.
- tree_over_merged: gradient of 8 rollouts that share a prompt of 256 and go on in two ways, 64 tokens a part, as a prefix
  tree against merged rows.
- tree_cost_spread: CPU seconds for each unique token of such trees, the dearest over the cheapest of 4, 8 and 16 rollouts:
  1 where the cost is linear in unique tokens.
- of_peak_flops: floating point operations a second of the gradient of those three-turn rollouts, over those of a product of
  large matrices, on the same thread.
- prepare_64_over_4: CPU time of preparing a call (from the store to a row of a minibatch) of rollouts of 64 turns, over that
  of 4 turns: 1 where a rollout costs as much as its tokens; at most 1.5.

With --packing padded ours computes every row by itself against TRL: what then is left of the ratio is the engine's, the rest
is the prompt that a group shares.

Every ratio is "how many times quicker" for the first of its two names. Without .venv-trl those against TRL are null; a run
without --quick installs it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from agentlightning.algorithms import LightningRL
from agentlightning.config.engine import EngineConfig
from agentlightning.engines.local.decoder import open_decoder
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.scheduler import SamplingRequest, Scheduler
from agentlightning.engines.setup import LearnerSetup
from agentlightning.training_types import Loss, TrainingSequence, Trajectory, Transition
from peers import install_peer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "training"))

from prepare import prepare_ms  # noqa: E402
from work import END, QUICK, VOCABULARY, Workload, branches, tokens, turns, unique, word, write_model  # noqa: E402

TRL = HERE.parent / ".venv-trl"
LOCK = HERE / "training" / "trl.lock"
TORCH = "2.13.0"
LOSS = Loss()
RATE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a look at whether it runs: short rounds, nothing installed"
    )
    parser.add_argument(
        "--packing", choices=("prefix_tree", "padded"), default="prefix_tree", help="of ours, against TRL"
    )
    options = parser.parse_args()
    quick = options.quick
    if not quick:
        install_peer("TRL", TRL, LOCK, TORCH)
    work, rounds = (QUICK, 3) if quick else (Workload(), 5)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        parameters = write_model(model)
        print(f"model    {parameters / 1e6:.2f} million parameters; {work}")
        figures = against_trl(model, work, rounds, options.packing, stack)
        figures |= against_ourselves(model, rounds, small=quick)
    figures["prepare_64_over_4"] = prepare_64_over_4(128 if quick else 1024, rounds)
    print(json.dumps(figures))


def against_trl(model: Path, work: Workload, rounds: int, packing: str, stack: ExitStack) -> dict[str, float | None]:
    draw = random.Random(0)
    prompts = [tokens(work.prompt, draw) for _ in range(work.tasks)]
    contestants: dict[str, Callable[[], dict[str, float]]] = {
        "ours": Ours(model, work, prompts, packing).step,
    }
    if (TRL / ".installed").exists():
        contestants["trl"] = Peer(model, work, prompts, stack).step
    else:
        print(f"trl: left out, since {TRL.name} is not there; a run without --quick installs it")
    for step in contestants.values():  # the first does not count
        step()
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, step in contestants.items():
            seen[name].append(step())
    medians = {
        name: {key: statistics.median(step[key] for step in steps) for key in steps[0]} for name, steps in seen.items()
    }
    for name, found in medians.items():
        spread = "-".join(f"{pick(step['step_s'] for step in seen[name]):.2f}" for pick in (min, max))
        print(
            f"{name:<8} step {found['step_s']:6.3f} s ({spread}), sampling {found['generate_s']:6.3f}, "
            f"training {found['train_s']:6.3f}"
        )
    trl = medians.get("trl")
    return {
        "ours_over_trl_train": over(trl["train_s"] if trl else None, medians["ours"]["train_s"]),
        "ours_over_trl_step": over(trl["step_s"] if trl else None, medians["ours"]["step_s"]),
    }


def prepare_64_over_4(calls: int, rounds: int) -> float:
    long, short = (asyncio.run(prepare_ms(turns, calls, rounds)) for turns in (64, 4))
    print(f"prepare  {long:.3f} ms per call of rollouts of 64 turns, {short:.3f} ms per call of 4")
    return round(long / short, 3)


def against_ourselves(model: Path, rounds: int, small: bool) -> dict[str, float | None]:
    padded, shared = (
        Learner(model, LearnerSetup(config=EngineConfig(packing="padded"))),
        Learner(model, LearnerSetup(config=EngineConfig(packing="prefix_tree"))),
    )
    merged, calls = turns(2 if small else 16)
    trees = {rollouts: branches(rollouts) for rollouts in ((2, 4) if small else (4, 8, 16))}
    middle = sorted(trees)[len(trees) // 2] if not small else 4
    work: dict[str, tuple[Learner, list[TrainingSequence]]] = {
        "merged": (padded, merged),
        "transition": (padded, calls),
        "branches": (padded, trees[middle]),
    } | {f"tree {rollouts}": (shared, rows) for rollouts, rows in trees.items()}
    seen: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, (learner, rows) in work.items():
            started = time.process_time()
            learner.forward_backward(rows, LOSS)
            took = time.process_time() - started
            learner.model.zero_grad(set_to_none=True)
            if number:  # the first does not count
                seen[name].append(took)
    medians = {name: statistics.median(times) for name, times in seen.items()}
    for name, took in medians.items():
        rows = work[name][1]
        said = f"{sum(len(row.tokens) for row in rows)} tokens, {unique(rows)} of them unique"
        print(f"{name:<11} gradient {took:6.3f} s, {said}")
    costs = [medians[f"tree {rollouts}"] / unique(rows) for rollouts, rows in trees.items()]
    return {
        "merged_over_transition": over(medians["transition"], medians["merged"]),
        "tree_over_merged": over(medians["branches"], medians[f"tree {middle}"]),
        "tree_cost_spread": round(max(costs) / min(costs), 3),
        "of_peak_flops": round(gradient_flops(model, merged) / medians["merged"] / peak_flops(), 3),
    }


def over(theirs: float | None, ours: float) -> float | None:
    return None if theirs is None else round(theirs / ours, 3)


class Ours:
    """The sampler's scheduler and the learner in this process, as the engine's children run them."""

    def __init__(self, model: Path, work: Workload, prompts: list[list[int]], packing: Any) -> None:
        self._work, self._prompts = work, prompts
        decoder = open_decoder(model)
        self._scheduler = Scheduler(decoder, max_num_seqs=64, decode_text=lambda ids: "")
        self._learner = Learner(model, LearnerSetup(config=EngineConfig(packing=packing)))
        self._algorithm = LightningRL(group_size=work.group, minibatches=1)
        self._weights = model.parent / f"weights-{packing}"
        self._steps = 0

    def step(self) -> dict[str, float]:
        started = time.process_time()
        answers = self._sample()
        sampled = time.process_time()
        groups = [
            [self._trajectory(task, at, request) for at, request in enumerate(group)]
            for task, group in enumerate(answers)
        ]
        plan = self._algorithm.plan(groups, seed=self._steps)
        for minibatch in plan.minibatches:
            self._learner.forward_backward(minibatch, plan.loss)
            self._learner.optim_step(RATE, 1.0)
        self._steps += 1
        self._learner.export(self._weights)
        self._scheduler.load(self._weights, str(self._steps))
        ended = time.process_time()
        return {"step_s": ended - started, "generate_s": sampled - started, "train_s": ended - sampled}

    def _sample(self) -> list[list[SamplingRequest]]:
        answers = [
            [
                SamplingRequest(
                    prompt=prompt,
                    max_tokens=self._work.answer,
                    seed=(self._steps * self._work.tasks + task) * self._work.group + at,
                    stop_ids=frozenset({END}),
                )
                for at in range(self._work.group)
            ]
            for task, prompt in enumerate(self._prompts)
        ]
        for request in (request for group in answers for request in group):
            self._scheduler.submit(request)
        while self._scheduler.busy:
            self._scheduler.turn()
        return answers

    def _trajectory(self, task: int, at: int, request: SamplingRequest) -> Trajectory:
        assert len(request.sampled) == self._work.answer
        call = Transition(
            call_id=f"{task}/{at}",
            suffix_ids=request.prompt,
            sampled_ids=request.sampled,
            logprobs=request.logprobs,
            versions=[],
        )
        reward = sum(request.sampled) / len(request.sampled) / VOCABULARY
        return Trajectory(rollout_id=f"{task}/{at}", group_id=str(task), reward=reward, transitions=[call])


class Peer:
    """TRL in a process of its own, a step at a time."""

    def __init__(self, model: Path, work: Workload, prompts: list[list[int]], stack: ExitStack) -> None:
        settings = {name: getattr(work, name) for name in ("tasks", "group", "answer", "trl_rows")}
        settings |= {"vocabulary": VOCABULARY, "prompts": [" ".join(map(word, prompt)) for prompt in prompts]}
        self._log = model.parent / "trl.log"
        self._answer = work.answer
        self._process = subprocess.Popen(
            [str(TRL / "bin" / "python"), str(HERE / "training" / "trl_steps.py"), str(model), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(self._log.open("wb")),
            text=True,
        )
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)
        self._read()

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        report = self._read()
        if report.pop("lengths") != [self._answer]:
            sys.exit("trl: not every answer has the length that was asked for")
        return report

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"trl ended: {self._log.read_text(errors='replace')[-2000:]}")
        report: dict[str, Any] = json.loads(line)
        return report


def gradient_flops(model: Path, rows: list[TrainingSequence]) -> float:
    """Of the forward and the backward pass of separate rows without padding.

    6 for each parameter and token (Kaplan et al., 2020, Scaling Laws for Neural Language Models, section 2.1), of which the
    head's only for trained tokens, and 12 x width for each layer and pair of a token and one that it sees.
    """
    config = json.loads((model / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    keys = width * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * width * width + 2 * width * keys + 3 * width * config["intermediate_size"]
    lengths, trained = [len(row.tokens) for row in rows], sum(sum(row.mask) for row in rows)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return float(6 * layer * layers * sum(lengths) + 6 * width * VOCABULARY * trained + 12 * width * layers * pairs)


def peak_flops(size: int = 1024, times: int = 7) -> float:
    """Of a product of two square float32 matrices on one thread, the best of some."""
    one, other = torch.randn(size, size), torch.randn(size, size)
    took = []
    for _ in range(times):
        started = time.process_time()
        torch.mm(one, other)
        took.append(time.process_time() - started)
    return 2 * size**3 / min(took)


if __name__ == "__main__":
    main()
