"""The learner: gradients, updates and checkpoints of one model; and its process, or one of its ranks.

    python -m agentlightning.engines.local.learner --model DIR --fd N [options]

An engine drives the process over a socket pair with (method, arguments) messages; with several processes, this one is rank
0 and starts the others with its own arguments (sharding.py). A warm start drives the class in process. It computes one SUM
over tokens of weight × loss and refuses to know rewards and rollouts.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import contextlib
import copy
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentlightning.adapters.sequences import log_ratios
from agentlightning.config.engine import BETAS, FsdpLearner
from agentlightning.engines import pipe as child_pipe
from agentlightning.engines.base import SKIPPED, LearnerSetup
from agentlightning.engines.folders import LEARNER_STATE, copy_tokenizer
from agentlightning.engines.local.batches import Batch, batches, check_sequences
from agentlightning.engines.local.decoding import BatchRules, batch_rules
from agentlightning.engines.local.images import Sight
from agentlightning.engines.local.model import (
    FOLDER,
    LLAMA_SHAPED,
    LLAMA_TYPES,
    Adapter,
    Hardware,
    add_dropout,
    check_device,
    first_writes,
    grow_trees,
    grows_trees,
    has_sight,
    is_tiny,
    load_model,
    narrowed,
    recomputable,
    recompute,
    settle,
    write_model,
)
from agentlightning.engines.local.optimizer import Optimizer, ValueHead
from agentlightning.engines.local.parts import WeightsForm
from agentlightning.engines.local.sharding import Follow, Ranks, copy_into, hidden_states, lead, reshard, shard, whole
from agentlightning.engines.losses import (
    Tokens,
    call_ratios,
    check_preferences,
    coefficients,
    known_tokens,
    needs_calls,
    over_all_tokens,
    ratio,
    sampled_numbers,
    sampled_token_loss,
    summary,
)
from agentlightning.engines.machine import default_threads
from agentlightning.engines.pipe import Pipe
from agentlightning.errors import AgentLightningError, EngineError, ModelError, printable
from agentlightning.rendering.grammar import Grammars
from agentlightning.rendering.model_folder import end_ids
from agentlightning.runtime.children import end_with_parent, keep_files_private
from agentlightning.runtime.log_lines import line_handler
from agentlightning.runtime.watchdog import HangLimits, beat_to_parent
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TokenNumbers, TrainingSequence

LOGITS_AT_ONCE, CUDA_LOGITS_AT_ONCE = 1 << 23, 1 << 28
MAX_KEPT_MICROBATCHES = 2
"""A longer row is computed again in the backward pass, a third slower, in place of keeping its activations."""

log = logging.getLogger("agentlightning.learner")


class States(NamedTuple):
    """N states of a micro-batch, each with the token that it predicts."""

    states_NX: Tensor
    temperatures_N: Tensor
    targets_N: Tensor
    places_N: Tensor
    """Within the micro-batch, by which their rules are found."""


class Learner:
    """A model, its optimizer and its random state.

    Weights and optimizer are float32; dtype "bfloat16" computes under autocast. Dropout is residual dropout (embeddings,
    attention and MLP outputs), only in forward_backward. At most logits_at_once logits exist at a time (by default 32 MB
    as float32, on CUDA 1 GB). on_progress: called before each micro-batch. ranks: with several processes, each has a part
    of the weights and computes a share of the sequences; what they return is of all of them.
    """

    def __init__(
        self,
        model_dir: str | Path,
        setup: LearnerSetup | None = None,
        *,
        logits_at_once: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        ranks: Ranks | None = None,
    ) -> None:
        self._setup = setup = setup or LearnerSetup()
        self._config = config = setup.config
        self._folder = Path(model_dir)
        tiny = is_tiny(self._folder)
        hardware = settle(config.device, config.dtype, tiny=tiny)
        self.ranks = ranks or Ranks()
        threads = setup.threads or default_threads("learner", turns=setup.turns, tiny=tiny)
        torch.set_num_threads(max(1, threads // self.ranks.count))
        self._device = self.ranks.device(hardware.device)
        check_device(self._device)
        self._autocast = hardware.dtype == "bfloat16"
        self.model = load_model(self._folder, torch.float32)
        rank = config.lora_rank
        self._adapter = None if rank is None else Adapter(self.model, self._folder, rank, setup.seed)
        self._sight = self._new_sight()
        text = self.model.config.get_text_config()
        self._grammars = Grammars(self._folder, end_ids(self._folder), text.vocab_size)
        self._cuts = [0, 0]
        """Tokens of this forward_backward whose own cut took out what was sampled, and tokens with a cut."""
        at_once = logits_at_once or (CUDA_LOGITS_AT_ONCE if self._device.startswith("cuda") else LOGITS_AT_ONCE)
        self._piece = max(1, at_once // text.vocab_size)
        self._numbers: list[tuple[list[bool], Tensor | None]] = []
        """Each sequence of the last forward_backward: its mask, and ratios and entropies of its masked tokens (None: another
        rank's)."""
        self._config = config = config.model_copy(update=self._packing(hardware, tiny))
        self._noise = torch.Generator(device=self._device).manual_seed(setup.seed + self.ranks.rank)
        self._training = False
        self._pending = False
        self._computed = 0  # tokens of this rank, for the next update
        self._on_progress = on_progress
        self.updates = 0
        """Optimizer steps taken, over resumes."""
        # These give logits = lm_head(hidden) and nothing more, so that only sampled tokens need any.
        llama_inside = self._sight is not None and text.model_type in LLAMA_TYPES
        self._headless = type(self.model).__name__ in LLAMA_SHAPED or llama_inside
        if config.dropout:
            add_dropout(self.model, config.dropout, self._noise, lambda: self._training)
        if config.packing == "prefix_tree":
            grow_trees(self.model, self._folder)
        self._recomputed = self._recomputed_layers()
        """Layers to compute again in the backward pass of a row that outgrows its micro-batch."""
        self._critic = self._new_critic()
        copied = setup.needs.reference and self._adapter is None
        self._reference = copy.deepcopy(self.model).requires_grad_(False) if copied else None
        for model in (self.model, self._reference):
            if model is not None:
                self._place(model)
        self._optimizer = Optimizer(self.model, config.optimizer, setup.learning_rate)

    def _recomputed_layers(self) -> list[Any]:
        """Those that only some rows recompute: all, unless every row does, or none may."""
        layers = recomputable(self.model)
        if self._config.gradient_checkpointing:
            if not layers:
                raise ModelError(f"model {self._folder}: {type(self.model).__name__} has no layer to recompute")
            recompute(layers)
            return []
        # Several ranks compute batches of different lengths together; dropout would draw other noise the second time.
        return [] if self._config.dropout or self.ranks.count > 1 else layers

    def _packing(self, hardware: Hardware, tiny: bool) -> dict[str, Any]:
        """Settings that the model and the machine decide; equal on every rank, since each counts the others' batches."""
        config, packing = self._config, self._config.packing
        if packing == "auto":
            padded = tiny or config.dropout or self._device != "cpu" or grows_trees(self.model)
            packing = "padded" if padded else "prefix_tree"
        most = config.max_tokens_per_microbatch
        if not tiny:
            text = self.model.config.get_text_config()
            most = min(self.ranks.gather(hardware.microbatch_tokens(most, text)))
        return {"packing": packing, "max_tokens_per_microbatch": most}

    def _place(self, model: Any) -> None:
        """On its device, of several ranks each with its part there."""
        if self.ranks.count == 1:
            model.to(self._device)
            return
        if self._headless:
            model.hidden_states = partial(hidden_states, model)
        shard(model, self._folder, self.ranks.mesh(self._device), bfloat16=self._autocast)
        # FSDP looks once, in the first pass, at what is trained: with the adapter on.
        with torch.no_grad():
            self._states(model, Batch([], torch.zeros(1, 1, dtype=torch.int64, device=self._device), []))
        reshard(model)

    def _new_critic(self) -> ValueHead | None:
        rate = self._setup.needs.critic_learning_rate
        if rate is None:
            return None
        if not self._headless:
            name = type(self.model).__name__
            raise ModelError(f"model {self._folder}: a critic needs hidden states, which {name} keeps")
        ratio, width = rate / self._setup.learning_rate, self.model.config.get_text_config().hidden_size
        betas = self._config.optimizer.betas or BETAS
        return ValueHead(width, betas, learning_rate_ratio=ratio, device=self._device, seed=self._setup.seed)

    def _new_sight(self) -> Sight | None:
        if not has_sight(self.model.config):
            return None
        for refused, name in ((self._adapter, "engine.lora_rank"), (self.ranks.count > 1, "engine.learner = 'fsdp'")):
            if refused:
                raise ModelError(f"model {self._folder}: {name} does not fit a model with sight; leave it out")
        return Sight(self.model, self._folder)

    def forward_backward(self, sequences: Sequence[TrainingSequence], loss: Loss) -> dict[str, float]:
        """Add the gradient of SUM over tokens of weight × loss; see Engine.forward_backward for the metrics."""
        self._check(sequences)
        reports: list[Tensor] = []
        count = 0
        self._cuts = [0, 0]
        numbers: dict[int, Tensor] = {}
        self._training = True
        try:
            for batch in self._batches([s for s in sequences if any(s.mask)]):
                found, numbers_2N = self._backward(batch, loss)
                reports += found
                count += numbers_2N.shape[1]
                of_rows = torch.split(numbers_2N, [sum(sequence.mask) for sequence in batch.sequences], 1)
                numbers |= zip(map(id, batch.sequences), of_rows, strict=True)
        finally:
            self._training = False
        self._numbers = [(sequence.mask, numbers.get(id(sequence))) for sequence in sequences]
        value_loss = 0.0 if self._critic is None or loss.value is None else self._critic.report()
        of_ranks = self.ranks.gather(([report.cpu() for report in reports], count, value_loss, self._cuts))
        found_reports, counts, value_losses, cuts = zip(*of_ranks, strict=True)
        self._pending = self._pending or sum(counts) > 0
        metrics = summary(loss, [report for found in found_reports for report in found], sum(counts))
        if self._critic is not None and loss.value is not None:
            metrics["value_loss"] = sum(value_losses)
        cut, with_cuts = (sum(column) for column in zip(*cuts, strict=True))
        return metrics | ({"cut_mismatch": cut / with_cuts} if with_cuts else {})

    def token_numbers(self) -> list[TokenNumbers]:
        """Ratios and entropies in the last forward_backward, for every token of its sequences; see Engine.token_numbers."""
        own = {place: found.tolist() for place, (_, found) in enumerate(self._numbers) if found is not None}
        known = {place: rows for of_rank in self.ranks.gather(own) for place, rows in of_rank.items()}
        return [over_all_tokens(mask, *known.get(place, ([], []))) for place, (mask, _) in enumerate(self._numbers)]

    def forward_backward_preferences(
        self,
        examples: Sequence[Preference],
        loss: PreferenceLoss,
        mismatched: Sequence[Sequence[TrainingSequence]] = (),
    ) -> dict[str, float]:
        """Add the gradient of SUM over examples of weight × loss; see Engine.forward_backward_preferences.

        Two passes, as engines/losses.py explains: pairs need not fit into one micro-batch.
        """
        if self._config.dropout:
            raise EngineError(
                f"the loss {loss.name!r} takes two passes, which dropout would make differ; expected dropout 0"
            )
        check_preferences(loss, examples)
        answers = [rows for example in examples for rows in (example.chosen, example.rejected) if rows]
        ratios_A = torch.tensor(self._log_ratios(answers), dtype=torch.float32)
        mismatched_M = torch.tensor(self._log_ratios(mismatched), dtype=torch.float32)
        if not answers:
            return {"loss": 0.0, "examples": 0.0}
        slopes_A, metrics = coefficients(loss, examples, ratios_A, mismatched_M)
        weighted = [
            replace(row, weights=[-slope] * len(row.tokens))  # of -log p
            for rows, slope in zip(answers, slopes_A.tolist(), strict=True)
            for row in rows
        ]
        return metrics | {"tokens": self.forward_backward(weighted, Loss(name="sft"))["tokens"]}

    def _log_ratios(self, answers: Sequence[Sequence[TrainingSequence]]) -> list[float]:
        return log_ratios(answers, self.logprobs([row for answer in answers for row in answer]))

    def logprobs(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """Log-probability of every token given those before it, at the sequence's temperature; 0 for the first."""
        return self._of_tokens(self.model, sequences, partial(self._logprobs, self.model))

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """The same under the frozen reference."""
        if self._adapter is not None:
            with self._adapter.off():
                return self.logprobs(sequences)
        if self._reference is None:
            raise EngineError("the learner keeps no reference; expected it to be started with reference = true")
        return self._of_tokens(self._reference, sequences, partial(self._logprobs, self._reference))

    def values(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """Values of the state before every token; 0 for the first."""
        critic = self._kept_critic()
        return self._of_tokens(self.model, sequences, lambda _, piece: critic.values(piece.states_NX))

    def _kept_critic(self) -> ValueHead:
        if self._critic is None:
            raise EngineError("the learner keeps no critic; expected it to be started with a critic_learning_rate")
        return self._critic

    def _of_tokens(
        self, model: Any, sequences: Sequence[TrainingSequence], number: Callable[[BatchRules | None, States], Tensor]
    ) -> list[list[float]]:
        """The `number` [N] of every token's state; 0 for the first token of a sequence."""
        self._check(sequences)
        found: dict[int, list[float]] = {}
        # FSDP gathers into the same memory in training, where tensors of inference mode may not be written.
        with torch.inference_mode() if self.ranks.count == 1 else torch.no_grad():
            for batch in self._batches(sequences):
                where = [(row, at) for row, s in enumerate(batch.sequences) for at in range(len(s.tokens) - 1)]
                states_NX = self._states(model, batch).flatten(0, 1)[batch.pick(where)]
                values: list[float] = []
                with self.ranks.keep_errors():
                    if where:
                        rules, chosen = self._chosen(batch, where, states_NX)
                        values = torch.cat([number(rules, piece) for piece, _ in self._pieces(chosen)]).tolist()
                start = 0
                for sequence in batch.sequences:
                    end = start + len(sequence.tokens) - 1
                    found[id(sequence)] = [0.0, *values[start:end]] if end > start else [0.0]
                    start = end
        reshard(model)
        own = {at: found[id(sequence)] for at, sequence in enumerate(sequences) if id(sequence) in found}
        everyone = {at: values for of_rank in self.ranks.gather(own) for at, values in of_rank.items()}
        return [everyone[at] for at in range(len(sequences))]

    def optim_step(self, learning_rate: float, grad_clip: float) -> dict[str, float]:
        """Clip the accumulated gradient to the norm, update, zero it; see Engine.optim_step for the metrics."""
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)))
        values_norm = 0.0
        if self._critic is not None:
            self.ranks.add_gradients(self._critic.parameters())
            values_norm = self._critic.clip(grad_clip)
        computed = {"learner_tokens": float(sum(self.ranks.gather(self._computed)))}
        if not (math.isfinite(norm) and math.isfinite(values_norm)):
            self._forget()
            return {**computed, **SKIPPED}
        metrics = computed | {"grad_norm": norm}
        self._optimizer.step(learning_rate)
        if self._critic is not None:
            self._critic.step(learning_rate)
        self._forget()
        self.updates += 1
        return metrics | ({} if self._critic is None else {"value_grad_norm": values_norm})

    def save(self, path: str | Path) -> None:
        """Write a transformers folder and the learner's state; whole or not at all. An old folder there is replaced."""
        if self._pending:
            raise EngineError("a learner is saved between updates; call optim_step first")
        keep = self.ranks.rank == 0
        state = {"optimizer": self._optimizer.state(keep), "updates": self.updates}
        state["noises"] = self.ranks.gather(self._noise.get_state())
        if self._critic is not None:
            state["critic"] = self._critic.state()

        def complete(folder: Path, weights: dict[str, Tensor]) -> None:
            if self._adapter is not None:
                self._adapter.save(folder / FOLDER, weights)
            torch.save(state, folder / LEARNER_STATE)

        self._write(Path(path), complete, f"the checkpoint {path} cannot be written", durable=True)

    def load(self, path: str | Path) -> None:
        """Back to a saved state: the next update is bit for bit the one that would have followed the save."""
        with self.ranks.keep_errors():
            self._load(Path(path))
        self.ranks.gather(None)  # no rank goes on where another could not read it

    def _load(self, path: Path) -> None:
        if not (path / LEARNER_STATE).is_file():
            raise ModelError(f"checkpoint {path}: it has no {LEARNER_STATE}, so it was not written by a learner")
        if (path / FOLDER).is_dir() != (self._adapter is not None):
            trained = "an adapter" if (path / FOLDER).is_dir() else "all weights"
            raise ModelError(f"checkpoint {path}: it was trained with {trained}, which engine.lora_rank does not say")
        # Of several ranks each takes its part out of the file: its device may not hold it all, nor the host once per rank.
        several = self.ranks.count > 1
        place = "cpu" if several else self._device
        state = torch.load(path / LEARNER_STATE, map_location=place, weights_only=True, mmap=several)
        try:
            if self._adapter is not None:
                self._adapter.load(path / FOLDER)
            else:
                copy_into(self.model.state_dict(), load_model(path, torch.float32).state_dict())
            self._optimizer.load(state["optimizer"])
            if self._critic is not None:
                self._critic.load(state["critic"])
        except (RuntimeError, ValueError, KeyError) as cause:
            raise ModelError(f"checkpoint {path}: it belongs to another model or optimizer ({cause})") from cause
        if self.ranks.rank < len(state["noises"]):  # more ranks than saved it: theirs go on as they are
            self._noise.set_state(state["noises"][self.ranks.rank].cpu())
        self.updates = state["updates"]
        self._forget()

    def _forget(self) -> None:
        """Drop the accumulated gradient."""
        self.model.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.forget()
        self._pending, self._computed = False, 0

    def export(self, folder: str | Path, form: WeightsForm = "weights") -> None:
        """Write what samplers take, whole or not at all, without the learner's state; for our own sampler, which computes in
        the learner's number format, in that: half the bytes under bfloat16."""
        problem, narrow = f"weights cannot be written to {folder}", form == "weights" and self._autocast
        self._write(Path(folder), lambda *_: None, problem, durable=form == "sealed", narrow=narrow)

    def _write(
        self,
        folder: Path,
        complete: Callable[[Path, dict[str, Tensor]], None],
        problem: str,
        *,
        durable: bool = False,
        narrow: bool = False,
    ) -> None:
        """A transformers folder, with merged weights if an adapter is trained; narrow: in bfloat16."""

        def write(weights: dict[str, Tensor]) -> None:
            def add(new: Path) -> None:
                copy_tokenizer(self._folder, new)
                complete(new, weights)

            merged = weights if self._adapter is None else self._adapter.merged(weights)
            write_model(self.model, folder, add, narrowed(merged) if narrow else merged, durable=durable)

        first_writes(self.model, self.ranks, write, problem)

    def _backward(self, batch: Batch, loss: Loss) -> tuple[list[Tensor], Tensor]:
        """Reports of its pieces, and ratios and entropies of its masked tokens."""
        where = [(row, at - 1) for row, s in enumerate(batch.sequences) for at, sampled in enumerate(s.mask) if sampled]
        kept = MAX_KEPT_MICROBATCHES * self._config.max_tokens_per_microbatch
        recompute(self._recomputed, batch.tokens_BT.numel() > kept)
        states_NX = self._states(self.model, batch).flatten(0, 1)[batch.pick(where)]
        # The graph is cut at the states, so that the logits of one piece at a time exist.
        cut_NX = states_NX.detach().requires_grad_()
        reports: list[Tensor] = []
        numbers_2N = torch.zeros(2, len(where))
        with self.ranks.keep_errors():
            if where:  # a rank without sequences of its own goes along with the others
                reports, numbers_2N = self._backward_of_pieces(batch, loss, where, cut_NX)
        gradient_NX = torch.zeros_like(cut_NX) if cut_NX.grad is None else cut_NX.grad
        states_NX.backward(gradient_NX)  # type: ignore[no-untyped-call]
        return reports, numbers_2N

    def _backward_of_pieces(
        self, batch: Batch, loss: Loss, where: Sequence[tuple[int, int]], cut_NX: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Add the gradient of head and critic, and that of the states to cut_NX; reports, ratios and entropies."""
        known = known_tokens(batch.sequences, self._device, calls=needs_calls(loss))
        if loss.kl and known.ref_logprobs is None:
            raise EngineError("the loss has a KL term, and its sequences have no ref_logprobs; see reference_logprobs")
        rules, chosen = self._chosen(batch, where, cut_NX)
        if needs_calls(loss) and len(where) > self._piece:
            # Pieces may cut a call in two: then its ratios come from a pass of their own through the head.
            with torch.no_grad():
                pieces = [self._logprobs(self.model, rules, piece) for piece, _ in self._pieces(chosen)]
                known = replace(known, ratios=call_ratios(torch.cat(pieces), known))
        columns = known.columns()
        reports, numbers = [], []
        for piece, parts in self._pieces(chosen, *columns.values()):
            tokens = Tokens(**dict(zip(columns, parts, strict=True)))
            logprobs, entropies = sampled_numbers(loss, self._distributions(self.model, rules, piece), piece.targets_N)
            total, report = sampled_token_loss(loss, logprobs, entropies, tokens)
            total.backward()  # type: ignore[no-untyped-call]
            reports.append(report)
            numbers.append(torch.stack([ratio(logprobs - tokens.base_logprobs), entropies]).detach())
        if rules is not None:
            self._cuts = [total + more for total, more in zip(self._cuts, rules.cuts(), strict=True)]
        if loss.value is not None:
            self._kept_critic().backward(cut_NX, known, loss)
        return reports, torch.cat(numbers, 1)

    def _states(self, model: Any, batch: Batch) -> Tensor:
        """[B, T, …] per position: hidden states where the head comes later, else logits."""
        with torch.autocast(self._device.split(":")[0], torch.bfloat16, enabled=self._autocast):
            inputs = {"input_ids": batch.tokens_BT, "use_cache": False, **batch.inputs}
            if self._sight is not None:
                inputs["inputs_embeds"] = self._sight.embeddings(model, batch.sequences, inputs.pop("input_ids"))
            if not self._headless:
                return model(**inputs).logits  # type: ignore[no-any-return]
            states: Tensor = hidden_states(model, **inputs) if self.ranks.count == 1 else model.hidden_states(**inputs)
        return states

    def _chosen(
        self, batch: Batch, where: Sequence[tuple[int, int]], states_NX: Tensor
    ) -> tuple[BatchRules | None, States]:
        """The states at these (sequence, position). Greedy completions report plain log-probabilities: 0 counts as 1."""
        heat = torch.tensor([batch.sequences[row].temperature or 1.0 for row, _ in where], device=self._device)
        targets = torch.tensor([batch.sequences[row].tokens[at + 1] for row, at in where], device=self._device)
        places = torch.arange(len(where), device=self._device)
        return batch_rules(self._grammars, batch.sequences, where), States(states_NX, heat.float(), targets, places)

    def _pieces(self, chosen: States, *columns: Tensor) -> Iterator[tuple[States, tuple[Tensor, ...]]]:
        split = (torch.split(column, self._piece) for column in (*chosen, *columns))
        for parts in zip(*split, strict=True):
            yield States(*parts[: len(chosen)]), parts[len(chosen) :]

    def _distributions(self, model: Any, rules: BatchRules | None, piece: States) -> Tensor:
        """Log-probabilities of the policy that acted: under the grammars, penalties and cuts of the calls."""
        with torch.autocast(self._device.split(":")[0], torch.bfloat16, enabled=self._autocast):
            logits_NV = model.lm_head(piece.states_NX) if self._headless else piece.states_NX
        logits_NV = logits_NV.float()
        if rules is not None:
            logits_NV = rules.apply(logits_NV, piece.places_N, piece.temperatures_N)
        return torch.log_softmax(logits_NV / piece.temperatures_N[:, None], -1)

    def _logprobs(self, model: Any, rules: BatchRules | None, piece: States) -> Tensor:
        return self._distributions(model, rules, piece).gather(1, piece.targets_N[:, None])[:, 0]

    def _batches(self, sequences: Sequence[TrainingSequence]) -> Iterator[Batch]:
        rank, ranks = self.ranks.rank, self.ranks.count
        for batch in batches(sequences, self._config, self._device, rank=rank, ranks=ranks):
            self._on_progress()
            self._computed += batch.tokens_BT.numel() if self._training else 0
            yield batch

    def _check(self, sequences: Sequence[TrainingSequence]) -> None:
        for sequence in sequences:
            if self._sight is not None:
                self._sight.check(sequence)
            elif sequence.images:
                raise EngineError(f"a sequence of rollout {sequence.rollout_id} has images, and the model has no sight")
        check_sequences(sequences, self.model.config.get_text_config())


METHODS = (
    *("forward_backward", "forward_backward_preferences", "logprobs", "reference_logprobs", "values", "token_numbers"),
    *("optim_step", "save", "load", "export"),
)


def carry_out(learner: Learner, method: str, *arguments: Any) -> Any:
    """Of several ranks, one whose method fails unforeseen is in no collective of the others any more: it ends."""
    if method not in METHODS:
        raise EngineError(f"the learner has no method {method!r}")
    try:
        return getattr(learner, method)(*arguments)
    except AgentLightningError:
        raise
    except Exception as error:
        if learner.ranks.count > 1:
            raise
        log.exception("%s failed", method)
        raise EngineError(f"{method} failed: {type(error).__name__}: {error}") from error


def _join(given: argparse.Namespace, setup: LearnerSetup, pipe: Connection) -> tuple[Pipe, Ranks]:
    """Meet the other ranks, if there are any."""
    learner = setup.config.learner
    ranks = Ranks(given.rank, learner.processes if isinstance(learner, FsdpLearner) else 1)
    if ranks.count == 1:
        return pipe, ranks
    device = ranks.device(settle(setup.config.device, setup.config.dtype).device)
    limits = HangLimits(**json.loads(given.limits))
    if ranks.rank > 0:
        ranks.meet(device, limits, given.port)
        return Follow(pipe), ranks
    same = ["--model", given.model, "--setup", given.setup, "--limits", given.limits]
    return lead(ranks, pipe, device, limits, ["agentlightning.engines.local.learner", *same]), ranks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agentlightning.engines.local.learner")
    parser.add_argument("--model", required=True, help="transformers folder")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket pair's end")
    parser.add_argument("--setup", default="{}", help="LearnerSetup as JSON")
    parser.add_argument("--limits", default="{}", help="HangLimits of the other ranks as JSON")
    parser.add_argument("--rank", type=int, default=0, help="number of this process")
    parser.add_argument("--port", type=int, help="where the others meet rank 0")
    given = parser.parse_args(arguments)
    end_with_parent()
    keep_files_private()
    heartbeat = beat_to_parent()
    name = f"learner rank {given.rank}" if given.rank else "learner"
    logging.basicConfig(level=logging.INFO, handlers=[line_handler(f"%(asctime)s {name} %(message)s")])
    engine: Connection = Connection(given.fd)
    pipe: Pipe = engine
    setup = LearnerSetup.from_json(given.setup)
    try:
        pipe, ranks = _join(given, setup, engine)
        learner = Learner(given.model, setup, on_progress=heartbeat.progress, ranks=ranks)
        ranks.gather(None)
    except AgentLightningError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        pipe.send(("error", type(error).__name__, str(error)))
        return error.exit_code
    pipe.send(("ok", settle(setup.config.device, setup.config.dtype).device))
    with contextlib.suppress(ConnectionError):
        child_pipe.serve(partial(carry_out, learner), pipe, heartbeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
