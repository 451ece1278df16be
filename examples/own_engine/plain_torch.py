"""An engine in a hundred lines of plain torch, for docs/extend.md: it is right and it is slow.

agl train train.toml --set engine.name=plain_torch.py:PlainTorch
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from agentlightning.engines.base import (
    DEFAULT_POLICY,
    SKIPPED,
    Endpoints,
    EngineSetup,
    ForwardingEngine,
    Metrics,
    Support,
)
from agentlightning.engines.folders import LEARNER_STATE, copy_tokenizer, find_model, replace_folder, seal
from agentlightning.engines.losses import known_tokens, summary, token_loss
from agentlightning.errors import EngineError
from agentlightning.training_types import LOSSES, Loss, TrainingSequence


class PlainTorch(ForwardingEngine):
    """One process: the learner's model, and a copy of it that serves."""

    support = Support(
        engine="plain_torch",
        losses=frozenset(LOSSES),
        terms=True,
        reference=True,
    )
    device = "cpu"

    def __init__(self, setup: EngineSetup) -> None:
        setup.expect_only("device", "dtype")  # read: both are what the contract sets them to
        self._setup = setup

    async def start(self) -> dict[str, Endpoints]:
        self._folder = find_model(self._setup.model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        self._reference, self._serving = copy.deepcopy(self._model), copy.deepcopy(self._model)
        self._version = self._updates = 0
        self._optimizer = torch.optim.AdamW(self._model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", self._generate), web.get("/health", self._health)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return {DEFAULT_POLICY: Endpoints(urls=[f"http://127.0.0.1:{self._runner.addresses[0][1]}"])}

    async def watch(self) -> None:
        await asyncio.Event().wait()  # nothing here can die alone

    def pids(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        await self._runner.cleanup()

    async def restart_learner(self) -> None:
        raise EngineError("the learner lives in the trainer's own process")

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        """Called for every operation of the protocol; those that are not here are not in `support`."""
        if policy != DEFAULT_POLICY:
            raise EngineError(f"policy: expected 'default', got {policy!r}")
        return await asyncio.to_thread(getattr(self, f"_{operation}"), *arguments)

    # --- learning ---------------------------------------------------------------------------------------------------

    def _forward_backward(self, sequences: Sequence[TrainingSequence], loss: Loss) -> Metrics:
        reports, count = [], 0
        for row in sequences:
            trained = [place for place, sampled in enumerate(row.mask) if sampled]
            distributions = self._distributions(self._model, row)[[place - 1 for place in trained]]
            targets = torch.tensor([row.tokens[place] for place in trained])
            total, report = token_loss(loss, distributions, targets, known_tokens([row], "cpu", calls=True))
            total.backward()  # type: ignore[no-untyped-call]
            reports.append(report)
            count += len(trained)
        return summary(loss, reports, count)

    def _distributions(self, model: Any, row: TrainingSequence) -> torch.Tensor:
        if max(row.tokens) >= model.config.vocab_size:
            raise EngineError(f"an id of rollout {row.rollout_id} is not in the model's vocabulary")
        logits = model(input_ids=torch.tensor([row.tokens])).logits[0]
        return torch.log_softmax(logits / (row.temperature or 1.0), -1)  # greedy calls have plain log-probabilities

    def _optim_step(self, learning_rate: float, grad_clip: float) -> Metrics:
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), grad_clip))
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            return {**SKIPPED}
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1
        return {"grad_norm": norm}

    def _logprobs(self, sequences: Sequence[TrainingSequence], model: Any = None) -> list[list[float]]:
        with torch.inference_mode():
            found = [self._distributions(model or self._model, row)[:-1] for row in sequences]
        ids = [torch.tensor(row.tokens[1:])[:, None] for row in sequences]
        return [[0.0, *one.gather(1, of_row)[:, 0].tolist()] for one, of_row in zip(found, ids, strict=True)]

    def _reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        return self._logprobs(sequences, self._reference)

    def _save(self, path: Path) -> None:
        new = path.with_name(f".{path.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        self._model.save_pretrained(new)
        copy_tokenizer(self._folder, new)
        torch.save({"optimizer": self._optimizer.state_dict(), "updates": self._updates}, new / LEARNER_STATE)
        seal(new)  # the trainer resumes from whole checkpoints only
        replace_folder(new, path)

    def _load(self, path: Path) -> None:
        self._model.load_state_dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict())
        state = torch.load(path / LEARNER_STATE, weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]

    # --- sampling ---------------------------------------------------------------------------------------------------

    def _publish(self, version: int) -> None:
        self._serving.load_state_dict(self._model.state_dict())
        self._version = version

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        """vLLM's route of token ids in, token ids and log-probabilities out."""
        asked = await request.json()
        params = {"temperature": 1.0, "max_tokens": 256, "ignore_eos": False, **asked["sampling_params"]}
        if params.get("stop") or params.get("prompt_logprobs") is not None or params.get("top_p", 1) != 1:
            error = {"message": "stop, prompt_logprobs and top_p are not served by this engine"}
            return web.json_response({"error": error}, status=400)
        noise = torch.Generator().manual_seed(params.get("seed", 0))
        ends = set() if params["ignore_eos"] else {self._serving.config.eos_token_id, *params.get("stop_token_ids", ())}
        ids, content, spans = list(asked["token_ids"]), [], []
        while len(content) < params["max_tokens"] and not (content and ids[-1] in ends):
            with torch.inference_mode():
                logits = self._serving(input_ids=torch.tensor([ids])).logits[0, -1]
            logprobs = torch.log_softmax(logits / (params["temperature"] or 1.0), -1)
            drawn = (
                torch.multinomial(logprobs.exp(), 1, generator=noise) if params["temperature"] else logprobs.argmax()
            )
            ids.append(int(drawn))
            content.append({"token": f"token_id:{ids[-1]}", "logprob": float(logprobs[ids[-1]])})
            if not spans or spans[-1]["version"] != str(self._version):
                spans.append({"version": str(self._version), "start": len(content) - 1, "end": 0})
            spans[-1]["end"] = len(content)
            await asyncio.sleep(0)  # everybody's turn
        choice = {"index": 0, "token_ids": ids[len(asked["token_ids"]) :], "logprobs": {"content": content}}
        choice |= {"finish_reason": "stop" if ids[-1] in ends else "length", "weight_versions": spans}
        data = json.dumps({"request_id": asked.get("request_id"), "choices": [choice]})
        if not asked.get("stream"):
            return web.Response(text=data, content_type="application/json")
        return web.Response(text=f"data: {data}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
