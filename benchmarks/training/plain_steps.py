"""Plain transformers and a plain torch loop: the other side of benchmarks/real_model.py, one round for each line of stdin.

    python benchmarks/training/plain_steps.py MODEL_FOLDER WORKLOAD_JSON

`sample` is generate, every prompt `group` times; `learn` is one update. Prints {"seconds"} for each. With "bf16" the
sampler's weights are in bfloat16 and the learner computes in it by autocast.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Plain:
    def __init__(self, folder: str, work: dict[str, Any]) -> None:
        self.work = work
        dtype = torch.bfloat16 if work["bf16"] else torch.float32
        self.sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.learner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.learner.parameters(), lr=1e-6, fused=True)

    def sample(self) -> None:
        prompts, count = self.work["prompts"], self.work["answer"]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            self.sampler.generate(
                input_ids=ids,
                attention_mask=mask,
                num_return_sequences=self.work["group"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )

    def learn(self) -> None:
        rows, size = self.work["rows"], self.work["microbatch"]
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            width = max(len(prompt) + len(completion) for prompt, completion in part)
            ids = torch.tensor([[*a, *b] + [0] * (width - len(a) - len(b)) for a, b in part])
            with torch.autocast("cpu", torch.bfloat16, enabled=self.work["bf16"]):
                hidden = self.learner.model(ids, use_cache=False).last_hidden_state
                places = [hidden[at, len(a) - 1 : len(a) + len(b) - 1] for at, (a, b) in enumerate(part)]
                logits = self.learner.lm_head(torch.cat(places))  # of the completions alone
            targets = torch.tensor([token for _, completion in part for token in completion])
            logprobs = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])
            (-logprobs.sum() / sum(len(completion) for _, completion in rows)).backward()
        torch.nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    plain = Plain(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        started = time.perf_counter()
        getattr(plain, line.strip())()
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
