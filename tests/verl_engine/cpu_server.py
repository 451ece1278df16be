"""The process of a rollout server: a transformers model that samples in batches, token by token.

A pause for new weights stops what is in flight, which goes back as far as it came. Imports no verl, which takes 8 seconds of
CPU: its answers have the attributes of verl's TokenOutput.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM

MAX_BATCH = 64


@ray.remote
class CpuServer:
    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.end = self.model.generation_config.eos_token_id
        self.version: int | None = None
        self.waiting: asyncio.Queue[tuple[list[int], dict[str, Any], asyncio.Future[SimpleNamespace]]] = asyncio.Queue()
        self.running = asyncio.Event()
        self.asleep = False
        self.turn = asyncio.Lock()
        self.loop: asyncio.Task[None] | None = None

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        if self.loop is None:
            self.loop = asyncio.create_task(self._run())
        future = asyncio.get_running_loop().create_future()
        await self.waiting.put((list(prompt_ids), dict(sampling_params), future))
        return await future

    async def abort_all_requests(self, **_):
        self.running.clear()
        async with self.turn:  # until the batch in flight has noticed
            pass

    async def resume_generation(self):
        self.running.set()

    async def sleep(self):
        """Until the next weights: verl's own trainer frees the device so."""
        self.asleep = True
        await self.abort_all_requests()

    async def load_weights(self, weights, version):
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in weights:
                if name in own:
                    own[name].copy_(value)
        self.version = version
        if self.asleep:
            self.asleep = False
            self.running.set()

    async def _run(self):
        while True:
            batch = [await self.waiting.get()]
            await self.running.wait()
            await asyncio.sleep(0.002)  # more may come at once
            while not self.waiting.empty() and len(batch) < MAX_BATCH:
                batch.append(self.waiting.get_nowait())
            async with self.turn:
                found = await asyncio.to_thread(self._sample, [one[0] for one in batch], [one[1] for one in batch])
            for (_, _, future), output in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(output)

    @torch.no_grad()
    def _sample(self, prompts, params):
        """Rows padded on the left, one token each at a time; a row that ended is computed on and not read."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        heat = torch.tensor([one["temperature"] or 1.0 for one in params])[:, None]
        places, cache = (seen.cumsum(-1) - 1).clamp(min=0), None
        tokens, logprobs, open_rows = [[] for _ in prompts], [[] for _ in prompts], set(range(len(prompts)))
        while open_rows and self.running.is_set():
            out = self.model(
                input_ids=ids, attention_mask=seen, position_ids=places, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            found = torch.log_softmax(out.logits[:, -1].float() / heat, -1)
            drawn = torch.multinomial(found.exp(), 1)[:, 0]
            greedy = torch.tensor([one["temperature"] == 0 for one in params])
            drawn = torch.where(greedy, found.argmax(-1), drawn)
            for row in sorted(open_rows):
                token = int(drawn[row])
                tokens[row].append(token)
                logprobs[row].append(float(found[row, token]))
                ends = {*params[row].get("stop_token_ids", ()), *(() if params[row].get("ignore_eos") else (self.end,))}
                if token in ends or len(tokens[row]) == params[row]["max_tokens"]:
                    open_rows.discard(row)
            ids, places = drawn[:, None], places[:, -1:] + 1
            seen = torch.cat([seen, torch.ones_like(ids)], 1)
        scores = [
            self._prompt_scores(prompt) if "prompt_logprobs" in one else {}
            for prompt, one in zip(prompts, params, strict=True)
        ]
        return [
            SimpleNamespace(
                token_ids=tokens[row],
                log_probs=logprobs[row],
                stop_reason="aborted" if row in open_rows else "completed",
                num_preempted=0,
                routed_experts=None,
                extra_fields={"global_steps": self.version, **scores[row]},
            )
            for row in range(len(prompts))
        ]

    def _prompt_scores(self, prompt):
        """As verl's vLLM server does: a list for each token but the first, and a filler for the last."""
        found = torch.log_softmax(self.model(input_ids=torch.tensor([prompt])).logits[0].float(), -1)
        own = found[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).tolist()
        return {"prompt_logprobs": [*own, [0.0]]}
