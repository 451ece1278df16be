"""TRL's side of gpu.py and real_model.py, run by a Python that has TRL: GRPOTrainer, one step for each line of stdin.

    python benchmarks/training/trl_steps.py MODEL_FOLDER WORKLOAD_JSON

Prints a JSON line when it is ready and one a step: {"step_s", "generate_s", "train_s", "lengths", "reward"}, in seconds, by
vLLM on the same device where a CUDA device's environment has it. With "answers" in the workload the reward is that of
word_problems.py, else a sum over ids; with "save" the weights are written there at the end of stdin. It has what its
documentation names for speed: SDPA attention, a fused AdamW, no gradient checkpointing (which it turns on by itself), no
reference model, no logging; bfloat16 by autocast, its default, where the workload says so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from word_problems import score


class Timed(GRPOTrainer):
    """Notes how long it samples."""

    generate_s = 0.0
    lengths: tuple[int, ...] = ()
    mean_reward = 0.0

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        found = super()._generate(*arguments, **named)
        self.generate_s += time.perf_counter() - started
        self.lengths = tuple(sorted({len(ids) for ids in found[1]}))
        return found


class OnRequest(TrainerCallback):
    """Waits for a line before each step and reports after it."""

    def __init__(self, save: str | None) -> None:
        self.trainer: Any = None
        self.save = save
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not sys.stdin.readline():
            if self.save is not None:
                self.trainer.save_model(self.save)
            os._exit(0)
        self.trainer.generate_s = 0.0
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step_s = time.perf_counter() - self.started
        generate_s = self.trainer.generate_s
        report = {"step_s": step_s, "generate_s": generate_s, "train_s": step_s - generate_s}
        say(report | {"lengths": self.trainer.lengths, "reward": self.trainer.mean_reward})


def say(report: dict[str, Any]) -> None:
    sys.__stdout__.write(json.dumps(report) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def main() -> None:
    folder, work = sys.argv[1], json.loads(sys.argv[2])
    sys.stdout = sys.stderr  # what it prints itself is not for us
    cuda = str(work.get("device", "cpu")).startswith("cuda")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tasks, group, answer = work["tasks"], work["group"], work["answer"]
    rows = tasks * group

    def reward(completions: list[Any], completion_ids: list[list[int]], **row: Any) -> list[float]:
        if "answers" in work:
            pairs = zip(completions, row["answer"], strict=True)
            found = [score(completion[0]["content"], expected) for completion, expected in pairs]
        else:
            found = [sum(ids) / len(ids) / work["vocabulary"] for ids in completion_ids]
        trainer.mean_reward = sum(found) / len(found)
        return found

    config = GRPOConfig(
        output_dir=os.path.join(folder, "trl"),
        per_device_train_batch_size=work["trl_rows"],
        gradient_accumulation_steps=rows // work["trl_rows"],
        num_generations=group,
        max_completion_length=answer,
        max_steps=100_000,
        learning_rate=work.get("learning_rate", 1e-4),
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        temperature=1.0,
        beta=0.0,
        bf16=work.get("bf16", cuda),
        use_cpu=not cuda,
        **({"use_vllm": True, "vllm_mode": "colocate"} if cuda and find_spec("vllm") else {}),
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
        seed=0,
    )
    waiting = OnRequest(work.get("save"))
    trainer = Timed(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [
                {"prompt": prompt, "answer": expected}
                for prompt, expected in zip(work["prompts"], work.get("answers", work["prompts"]), strict=True)
            ]
        ),
        processing_class=tokenizer,
        callbacks=[waiting],
    )
    waiting.trainer = trainer
    say({"ready": True, "parameters": sum(p.numel() for p in model.parameters())})
    trainer.train()


if __name__ == "__main__":
    main()
