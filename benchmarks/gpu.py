"""Speed of sampling, learning and publishing on one device, by the Engine protocol alone; against TRL's GRPO with vLLM.

    python benchmarks/gpu.py --size 0.5b                          # on a GPU
    python benchmarks/gpu.py --model Qwen/Qwen2.5-0.5B-Instruct   # real weights; speed needs none
    python benchmarks/gpu.py --size tiny --device cpu             # keeps this file true where there is no GPU

The work is an agent's: every rollout has three calls, each of which continues the one before with what a tool gave, and all
rollouts of a step are sampled side by side, over HTTP. Wall time, medians of the rounds; the first does not count.

- sampled_tokens_per_s: by the sampler of each engine (--engines: local; vllm with --vllm-python, the Python of its venv).
- learner_tokens_per_s, mfu: one forward_backward and optim_step of the rollouts' merged rows; 6 operations per parameter and
  token (Kaplan et al., 2020, section 2.1) over the device's peak: of its data sheet, else of a product of matrices.
- publish_s: from the learner's weights to the first token under the new version. step_s: all of it.
- ours_over_trl_step: steps of single calls, since TRL's GRPOTrainer has no others; with --trl-python, whose environment has
  trl and vllm (on a CPU without). How many times quicker ours is; null without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, Engine, EngineSetup, make_engine
from agentlightning.gateway.policy.engine_client import GENERATE, SampledTokens, read_answer
from agentlightning.training_types import Loss, TrainingSequence

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "training"))

from work import row, word, write_tokenizer  # noqa: E402

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 512,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "vocab_size": 151936,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "vocab_size": 151936,
    },
}
"""Shapes of Qwen2.5, whose sizes they are; tiny is nobody's."""
MICROBATCH = {"tiny": 16384, "0.5b": 16384, "1.5b": 8192}
"""Padded tokens: 80 GB hold the sampler's keys and values and the learner's activations side by side."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bfloat16 operations a second, from NVIDIA's data sheets."""
RATE = 1e-6


@dataclass(frozen=True)
class Work:
    """One training step."""

    rollouts: int = 128
    calls: int = 3
    prompt: int = 512
    answer: int = 128
    tool: int = 64
    """Tokens that a tool gives after each call but the last."""


SMALL = Work(rollouts=4, prompt=32, answer=8, tool=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="0.5b", help="of a model with random weights")
    parser.add_argument("--model", help="hub name or folder of a real one instead, of about --size")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engines", nargs="+", choices=("local", "vllm"), default=["local"])
    parser.add_argument("--vllm-python", type=Path, help="the Python of vLLM's environment")
    parser.add_argument("--trl-python", type=Path, help="the Python of TRL's environment")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; expected one, or --size tiny --device cpu")
    if "vllm" in given.engines and given.vllm_python is None:
        sys.exit("--vllm-python: expected the Python of an environment with vLLM")
    work = SMALL if given.size == "tiny" and given.model is None else Work()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        if given.model is None:
            write_model(model, SIZES[given.size])
        name = given.model or str(model)
        figures: dict[str, Any] = {"device": device_name(given.device), "work": vars(work)}
        for engine in given.engines:
            measured = asyncio.run(measure(engine, name, work, given, Path(folder) / engine))
            figures |= {f"{engine}_{key}": value for key, value in measured.items()}
        single = Work(rollouts=work.rollouts, calls=1, prompt=work.prompt, answer=work.answer)
        ours = asyncio.run(measure(given.engines[-1], name, single, given, Path(folder) / "single"))["step_s"]
        theirs = trl_step_s(given, name, single) if given.trl_python else None
        figures |= {"single_call_step_s": ours, "trl_step_s": theirs}
        figures["ours_over_trl_step"] = round(theirs / ours, 2) if theirs else None
    print(json.dumps(figures))


async def measure(name: str, model: str, work: Work, given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Medians over the rounds of one engine."""
    engine = make_engine(
        EngineSetup(model=model, work_dir=folder, config=engine_config(name, given), learning_rate=RATE)
    )
    seen: list[dict[str, float]] = []
    try:
        served = (await engine.start())[DEFAULT_POLICY]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            for number in range(given.rounds + 1):
                seen.append(await step(engine, served, http, work, number))
                print(
                    f"{name:<6} round {number}  " + "  ".join(f"{key} {value:.3f}" for key, value in seen[-1].items())
                )
    finally:
        await engine.close()
    medians = {key: statistics.median(one[key] for one in seen[1:]) for key in seen[0]}
    sampled = work.rollouts * work.calls * work.answer
    learned = work.rollouts * (work.prompt + work.calls * work.answer + (work.calls - 1) * work.tool)
    operations = 6 * parameters(model) * learned
    return {
        "sampled_tokens_per_s": round(sampled / medians["sample_s"], 1),
        "learner_tokens_per_s": round(learned / medians["learn_s"], 1),
        "mfu": round(operations / medians["learn_s"] / peak_flops(given.device), 4),
        "publish_s": round(medians["publish_s"], 4),
        "step_s": round(sum(medians.values()), 4),
    }


def engine_config(name: str, given: argparse.Namespace) -> EngineConfig:
    settings: dict[str, Any] = {"device": given.device, "max_num_seqs": 256}
    settings["max_tokens_per_microbatch"] = MICROBATCH[given.size]
    if name == "vllm":
        settings["sampler"] = {"type": "vllm", "python": str(given.vllm_python)}
    return EngineConfig(**settings)


async def step(
    engine: Engine, served: Endpoints, http: aiohttp.ClientSession, work: Work, number: int
) -> dict[str, float]:
    """Sample, learn, publish; seconds of each."""
    started = time.perf_counter()
    rollouts = [sample(served, http, work, f"{number} {one}") for one in range(work.rollouts)]
    rows = await asyncio.gather(*rollouts)
    sampled = time.perf_counter()
    await engine.forward_backward(rows, Loss())
    await engine.optim_step(RATE, 1.0)
    learned = time.perf_counter()
    await engine.publish(number + 1)
    answer = await complete(served, http, rows[0].tokens[: work.prompt], 1)
    if answer.versions[0].version != number + 1:
        sys.exit(f"version {answer.versions[0].version} serves after version {number + 1} was published")
    return {"sample_s": sampled - started, "learn_s": learned - sampled, "publish_s": time.perf_counter() - learned}


async def sample(served: Endpoints, http: aiohttp.ClientSession, work: Work, seed: str) -> TrainingSequence:
    """One rollout as the row that is learned from."""
    draw = random.Random(seed)
    ids, calls, logprobs = [draw.randrange(2, 500) for _ in range(work.prompt)], [], [0.0] * work.prompt
    for call in range(work.calls):
        found = await complete(served, http, ids, work.answer)
        calls.append((len(ids), len(ids) + work.answer))
        tool = [draw.randrange(2, 500) for _ in range(work.tool if call + 1 < work.calls else 0)]
        ids, logprobs = [*ids, *found.ids, *tool], [*logprobs, *found.logprobs, *(0.0 for _ in tool)]
    made = row(ids, calls)
    made.logprobs[:] = logprobs
    return made


async def complete(served: Endpoints, http: aiohttp.ClientSession, prompt: list[int], count: int) -> SampledTokens:
    params = {"temperature": 1.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0}
    request = {"request_id": "", "token_ids": prompt, "sampling_params": params, "stream": False}
    data = {**request, "model": served.served_model or DEFAULT_POLICY}
    async with http.post(f"{served.urls[0]}{GENERATE}", json=data, timeout=aiohttp.ClientTimeout(600)) as answer:
        answer.raise_for_status()
        sampled = SampledTokens()
        sampled.add(read_answer(await answer.read()), -1)
    if len(sampled.ids) != count:
        sys.exit(f"a completion has {len(sampled.ids)} tokens; expected {count}")
    return sampled


def trl_step_s(given: argparse.Namespace, model: str, work: Work) -> float:
    """Median of TRL's steps of the same size."""
    draw = random.Random(0)
    prompts = [" ".join(word(draw.randrange(2, 500)) for _ in range(work.prompt)) for _ in range(work.rollouts // 4)]
    settings = {"tasks": len(prompts), "group": 4, "answer": work.answer, "trl_rows": min(work.rollouts, 16)}
    settings |= {"prompts": prompts, "vocabulary": 500, "device": given.device}
    command = [str(given.trl_python), str(HERE / "training" / "trl_steps.py"), model, json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        took = []
        for _ in range(given.rounds + 2):  # its first line says that it is ready
            line = process.stdout.readline()
            if not line:
                sys.exit("trl ended; its errors stand above")
            took.append(json.loads(line).get("step_s", 0.0))
            process.stdin.write("step\n")
            process.stdin.flush()
        process.kill()
    return statistics.median(took[2:])


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """A Qwen2 of a shape with random weights and a tokenizer of 500 words."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**shape, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, 500)


def parameters(model: str) -> int:
    """Number of parameters that every token is multiplied with: all, where the head is the embedding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return sum(
            one.numel() for one in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).parameters()
        )


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def peak_flops(device: str) -> float:
    """Of the data sheet where the device is in PEAK_FLOPS, else of the best of five products of matrices."""
    for name, flops in PEAK_FLOPS.items():
        if name in device_name(device):
            return flops
    cuda = device.startswith("cuda")
    size, kind = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    one = torch.randn(size, size, device=device, dtype=kind)
    took = []
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(one, one)
        if cuda:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    return 2 * size**3 / min(took)


if __name__ == "__main__":
    main()
