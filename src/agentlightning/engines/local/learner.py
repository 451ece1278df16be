"""The learner: gradients, updates and checkpoints of one model, in process.

The process of an engine drives it (learner_process.py), and so does a warm start. It computes one SUM over tokens of weight
× loss and refuses to know rewards and rollouts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentlightning.engines.corrections import Tokens, call_ratios, known_tokens, needs_calls, over_all_tokens
from agentlightning.engines.local import layers
from agentlightning.engines.local.batches import Batch, batches, check_sequences
from agentlightning.engines.local.decoding import BatchRules, batch_rules
from agentlightning.engines.local.images import Sight
from agentlightning.engines.local.layers import FOLDER as ADAPTER
from agentlightning.engines.local.layers import Adapter
from agentlightning.engines.local.llama import LLAMA_SHAPED, LLAMA_TYPES
from agentlightning.engines.local.model import (
    check_device,
    first_writes,
    has_sight,
    load_model,
    narrowed,
    settle,
    write_model,
)
from agentlightning.engines.local.optimizer import Optimizer, ValueHead
from agentlightning.engines.local.parts import WeightsForm
from agentlightning.engines.local.sharding import Ranks, copy_into, hidden_states, reshard, shard, whole
from agentlightning.engines.local.threads import take_threads
from agentlightning.engines.losses import sampled_numbers, sampled_token_loss, summary
from agentlightning.engines.models import copy_tokenizer
from agentlightning.engines.preferences import check_preferences, coefficients
from agentlightning.engines.saved_folders import LEARNER_STATE
from agentlightning.engines.setup import LearnerSetup
from agentlightning.errors import EngineError, ModelError
from agentlightning.rendering.grammar import Grammars
from agentlightning.rendering.model_folder import end_ids
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TokenNumbers, TrainingSequence

LOGITS_AT_ONCE, CUDA_LOGITS_AT_ONCE = 1 << 25, 1 << 28


class Learner:
    """A model, its optimizer and its random state.

    Weights and optimizer are float32; dtype "bfloat16" computes under autocast. Dropout is residual dropout (embeddings,
    attention and MLP outputs), only in forward_backward. At most logits_at_once logits exist at a time (by default 128 MB
    as float32, on CUDA 1 GB): a vocabulary is large. on_progress: called before each micro-batch. ranks: with several
    processes, each has a part of the weights and computes a share of the sequences; what they return is of all of them.
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
        self.threads = take_threads(setup.threads)
        hardware = settle(config.device, config.dtype)
        self.ranks = ranks or Ranks()
        self._folder = Path(model_dir)
        self._device = self.ranks.device(hardware.device)
        check_device(self._device)
        self._autocast = hardware.dtype == "bfloat16"
        self.model = load_model(self._folder, torch.float32)
        self._adapter = (
            None if config.lora_rank is None else Adapter(self.model, self._folder, config.lora_rank, setup.seed)
        )
        self._sight = self._new_sight()
        vocab = self.model.config.get_text_config().vocab_size
        self._grammars = Grammars(self._folder, end_ids(self._folder), vocab)
        self._cuts = [0, 0]
        """Tokens of this forward_backward whose own cut took out what was sampled, and tokens with a cut."""
        at_once = logits_at_once or (CUDA_LOGITS_AT_ONCE if self._device.startswith("cuda") else LOGITS_AT_ONCE)
        self._piece = max(1, at_once // vocab)
        self._numbers: list[tuple[list[bool], Tensor | None]] = []
        """Each sequence of the last forward_backward: its mask, and ratios and entropies of its masked tokens (None: another
        rank's)."""
        self._noise = torch.Generator(device=self._device).manual_seed(setup.seed + self.ranks.rank)
        self._training = False
        self._pending = False
        self._computed = 0  # tokens of this rank, for the next update
        self._on_progress = on_progress
        self.updates = 0
        """Optimizer steps taken, over resumes."""
        # These give logits = lm_head(hidden) and nothing more, so that only sampled tokens need any.
        text = self.model.config.get_text_config().model_type
        self._headless = type(self.model).__name__ in LLAMA_SHAPED or (self._sight is not None and text in LLAMA_TYPES)
        self._change_layers()
        self._critic = self._new_critic()
        copied = setup.needs.reference and self._adapter is None
        self._reference = copy.deepcopy(self.model).requires_grad_(False) if copied else None
        for model in (self.model, self._reference):
            if model is not None:
                self._place(model)
        self._optimizer = Optimizer(self.model, config.optimizer, setup.learning_rate)

    def _change_layers(self) -> None:
        config = self._config
        if config.dropout:
            layers.add_dropout(self.model, config.dropout, self._noise, lambda: self._training)
        if config.packing == "prefix_tree":
            layers.grow_trees(self.model, self._folder)
        if config.gradient_checkpointing:
            layers.recompute(self.model, self._folder)

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
        self, examples: Sequence[Preference], loss: PreferenceLoss, mismatched: Sequence[TrainingSequence] = ()
    ) -> dict[str, float]:
        """Add the gradient of SUM over examples of weight × loss; see Engine.forward_backward_preferences.

        Two passes, as engines/preferences.py explains: pairs need not fit into one micro-batch.
        """
        if self._config.dropout:
            raise EngineError(
                f"the loss {loss.name!r} takes two passes, which dropout would make differ; expected dropout 0"
            )
        check_preferences(loss, examples)
        answers = [rows for example in examples for rows in (example.chosen, example.rejected) if rows]
        ratios_A = torch.tensor(self._log_ratios(answers), dtype=torch.float32)
        mismatched_M = torch.tensor(self._log_ratios([[s] for s in mismatched]), dtype=torch.float32)
        if not answers:
            return {"loss": 0.0, "examples": 0.0}
        slopes_A, metrics = coefficients(loss, examples, ratios_A, mismatched_M)
        weighted = [
            replace(row, weights=[-slope] * len(row.tokens))  # of -log p
            for rows, slope in zip(answers, slopes_A.tolist(), strict=True)
            for row in rows
        ]
        tokens = self.forward_backward(weighted, Loss(name="sft"))["tokens"]
        return metrics | {"tokens": tokens}

    def _log_ratios(self, answers: Sequence[Sequence[TrainingSequence]]) -> list[float]:
        """log(policy / reference) of each completion: the sum over the trained tokens of all its rows."""
        rows = [row for answer in answers for row in answer]
        values = iter(self.logprobs(rows))
        found = []
        for answer in answers:
            total = 0.0
            for row in answer:
                if row.ref_logprobs is None:
                    raise EngineError(f"a row of rollout {row.rollout_id} has no ref_logprobs; its loss needs them")
                of_row = zip(next(values), row.ref_logprobs, row.mask, strict=True)
                total += sum(now - ref for now, ref, sampled in of_row if sampled)
            found.append(total)
        return found

    def logprobs(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """Log-probability of every token given those before it, at the sequence's temperature; 0 for the first."""
        return self._logprobs(self.model, sequences)

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """The same under the frozen reference."""
        if self._adapter is not None:
            with self._adapter.off():
                return self._logprobs(self.model, sequences)
        if self._reference is None:
            raise EngineError("the learner keeps no reference; expected it to be started with reference = true")
        return self._logprobs(self._reference, sequences)

    def values(self, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        """Values of the state before every token; 0 for the first."""
        critic = self._kept_critic()
        return self._of_tokens(self.model, sequences, lambda rules, states_NX, *_: critic.values(states_NX))

    def _kept_critic(self) -> ValueHead:
        if self._critic is None:
            raise EngineError("the learner keeps no critic; expected it to be started with a critic_learning_rate")
        return self._critic

    def _logprobs(self, model: Any, sequences: Sequence[TrainingSequence]) -> list[list[float]]:
        def say(
            rules: BatchRules | None, states_NX: Tensor, temperatures_N: Tensor, targets_N: Tensor, places_N: Tensor
        ) -> Tensor:
            found = self._distributions(model, states_NX, temperatures_N, rules, places_N)
            return found.gather(1, targets_N[:, None])[:, 0]

        return self._of_tokens(model, sequences, say)

    def _of_tokens(
        self, model: Any, sequences: Sequence[TrainingSequence], say: Callable[..., Tensor]
    ) -> list[list[float]]:
        """`say` of every token's rules, state, temperature, id and place: [N]; 0 for the first token of a sequence."""
        self._check(sequences)
        found: dict[int, list[float]] = {}
        # FSDP gathers into the same memory in training, where tensors of inference mode may not be written.
        with torch.inference_mode() if self.ranks.count == 1 else torch.no_grad():
            for batch in self._batches(sequences):
                where = [(row, at) for row, s in enumerate(batch.sequences) for at in range(len(s.tokens) - 1)]
                states_NX = self._states(model, batch).flatten(0, 1)[batch.pick(where)]
                values: list[float] = []
                with self.ranks.keep_errors():
                    values = self._say(batch, where, states_NX, say) if where else []
                start = 0
                for sequence in batch.sequences:
                    end = start + len(sequence.tokens) - 1
                    found[id(sequence)] = [0.0, *values[start:end]] if end > start else [0.0]
                    start = end
        reshard(model)
        own = {at: found[id(sequence)] for at, sequence in enumerate(sequences) if id(sequence) in found}
        everyone = {at: values for of_rank in self.ranks.gather(own) for at, values in of_rank.items()}
        return [everyone[at] for at in range(len(sequences))]

    def _say(
        self, batch: Batch, where: Sequence[tuple[int, int]], states_NX: Tensor, say: Callable[..., Tensor]
    ) -> list[float]:
        temperatures_N, targets_N = self._temperatures(batch, where), self._targets(batch, where)
        rules, places_N = batch_rules(self._grammars, batch.sequences, where), self._places(where)
        pieces = self._pieces(states_NX, temperatures_N, targets_N, places_N)
        found: list[float] = torch.cat([say(rules, *piece) for piece in pieces]).tolist()
        return found

    def optim_step(self, learning_rate: float, grad_clip: float) -> dict[str, float]:
        """Clip the accumulated gradient to the norm, update, zero it; see Engine.optim_step for the metrics."""
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), grad_clip)))
        values_norm = 0.0
        if self._critic is not None:
            self.ranks.add_gradients(self._critic.parameters())
            values_norm = self._critic.clip(grad_clip)
        if not (math.isfinite(norm) and math.isfinite(values_norm)):
            self._forget()
            raise EngineError(f"the gradient's norm is {norm + values_norm}; the update was not applied")
        metrics = {"grad_norm": norm, "learner_tokens": float(sum(self.ranks.gather(self._computed)))}
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
        noises = self.ranks.gather(self._noise.get_state())
        state = {"optimizer": self._optimizer.state(keep), "noise": noises[0], "updates": self.updates}
        if self.ranks.count > 1:
            state["noises"] = noises
        if self._critic is not None:
            state["critic"] = self._critic.state()

        def complete(folder: Path, weights: dict[str, Tensor]) -> None:
            if self._adapter is not None:
                self._adapter.save(folder / ADAPTER, weights)
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
        if (path / ADAPTER).is_dir() != (self._adapter is not None):
            trained = "an adapter" if (path / ADAPTER).is_dir() else "all weights"
            raise ModelError(f"checkpoint {path}: it was trained with {trained}, which engine.lora_rank does not say")
        # Of several ranks each takes its part out of the file: its device may not hold it all, nor the host once per rank.
        several = self.ranks.count > 1
        place = "cpu" if several else self._device
        state = torch.load(path / LEARNER_STATE, map_location=place, weights_only=True, mmap=several)
        try:
            if self._adapter is not None:
                self._adapter.load(path / ADAPTER)
            else:
                copy_into(self.model.state_dict(), load_model(path, torch.float32).state_dict())
            self._optimizer.load(state["optimizer"])
            if self._critic is not None:
                self._critic.load(state["critic"])
        except (RuntimeError, ValueError, KeyError) as cause:
            raise ModelError(f"checkpoint {path}: it belongs to another model or optimizer ({cause})") from cause
        noises = state.get("noises", [state["noise"]])
        if self.ranks.rank < len(noises):  # more ranks than saved it: theirs go on as they are
            self._noise.set_state(noises[self.ranks.rank].cpu())
        self.updates = state["updates"]
        self._forget()

    def _forget(self) -> None:
        """Drop the accumulated gradient."""
        self.model.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.forget()
        self._pending, self._computed = False, 0

    def _new_critic(self) -> ValueHead | None:
        rate = self._setup.needs.critic_learning_rate
        if rate is None:
            return None
        if not self._headless:
            raise ModelError(
                f"model {self._folder}: a critic needs hidden states, which {type(self.model).__name__} keeps"
            )
        ratio, width = rate / self._setup.learning_rate, self.model.config.get_text_config().hidden_size
        return ValueHead(width, learning_rate_ratio=ratio, device=self._device, seed=self._setup.seed)

    def _new_sight(self) -> Sight | None:
        if not has_sight(self.model.config):
            return None
        for refused, name in ((self._adapter, "engine.lora_rank"), (self.ranks.count > 1, "engine.learner = 'fsdp'")):
            if refused:
                raise ModelError(f"model {self._folder}: {name} does not fit a model with sight; leave it out")
        return Sight(self.model, self._folder)

    def export(self, folder: str | Path, form: WeightsForm = "weights") -> None:
        """Write what samplers take, whole or not at all: no state of the learner. Our own sampler, which computes in the
        learner's number format, gets it in that: half the bytes under bfloat16."""
        folder, adapter = Path(folder), self._adapter
        problem = f"weights cannot be written to {folder}"
        if form == "adapter" and adapter is not None:
            first_writes(self.model, self.ranks, lambda weights: adapter.export(folder, weights), problem)
        else:
            narrow = form == "weights" and self._autocast
            self._write(folder, lambda *_: None, problem, durable=form == "sealed", narrow=narrow)

    def _write(
        self,
        folder: Path,
        complete: Callable[[Path, dict[str, Tensor]], None],
        problem: str,
        *,
        durable: bool = False,
        narrow: bool = False,
    ) -> None:
        """A transformers folder with merged weights where an adapter is trained; narrow: in bfloat16."""

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
        temperatures_N, targets_N = self._temperatures(batch, where), self._targets(batch, where)
        rules, places_N = batch_rules(self._grammars, batch.sequences, where), self._places(where)
        if needs_calls(loss) and len(where) > self._piece:
            known = replace(known, ratios=self._call_ratios(rules, known, cut_NX, temperatures_N, targets_N, places_N))
        names, columns = known.columns()
        reports, numbers = [], []
        first = (cut_NX, temperatures_N, targets_N, places_N)
        for states, temperatures, targets, places, *parts in self._pieces(*first, *columns):
            distributions = self._distributions(self.model, states, temperatures, rules, places)
            tokens = Tokens(**dict(zip(names, parts, strict=True)))
            logprobs, entropies = sampled_numbers(loss, distributions, targets)
            total, report = sampled_token_loss(loss, logprobs, entropies, tokens)
            total.backward()  # type: ignore[no-untyped-call]
            reports.append(report)
            numbers.append(torch.stack([(logprobs - tokens.base_logprobs).exp(), entropies]).detach())
        if rules is not None:
            self._cuts = [total + more for total, more in zip(self._cuts, rules.cuts(), strict=True)]
        if loss.value is not None:
            self._kept_critic().backward(cut_NX, known, loss)
        return reports, torch.cat(numbers, 1)

    def _call_ratios(self, rules: BatchRules | None, known: Tokens, *columns: Tensor) -> Tensor:
        """Pieces may cut a call in two: then its ratios come from a pass of their own through the head."""
        with torch.no_grad():
            parts = [
                self._distributions(self.model, states, temperatures, rules, places).gather(1, targets[:, None])[:, 0]
                for states, temperatures, targets, places in self._pieces(*columns)
            ]
            return call_ratios(torch.cat(parts), known)

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

    def _distributions(
        self, model: Any, states_NX: Tensor, temperatures_N: Tensor, rules: BatchRules | None, places_N: Tensor
    ) -> Tensor:
        """Log-probabilities of the policy that acted: under the grammars, penalties and cuts of the calls."""
        with torch.autocast(self._device.split(":")[0], torch.bfloat16, enabled=self._autocast):
            logits_NV = model.lm_head(states_NX) if self._headless else states_NX
        logits_NV = logits_NV.float()
        if rules is not None:
            logits_NV = rules.apply(logits_NV, places_N, temperatures_N)
        return torch.log_softmax(logits_NV / temperatures_N[:, None], -1)

    def _pieces(self, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(torch.split(column, self._piece) for column in columns), strict=True)

    def _batches(self, sequences: Sequence[TrainingSequence]) -> Iterator[Batch]:
        rank, ranks = self.ranks.rank, self.ranks.count
        for batch in batches(sequences, self._config, self._device, rank=rank, ranks=ranks):
            if self.threads is not None and self.threads.adjust() != torch.get_num_threads():
                torch.set_num_threads(self.threads.count)
            self._on_progress()
            self._computed += batch.tokens_BT.numel() if self._training else 0
            yield batch

    def _places(self, where: Sequence[tuple[int, int]]) -> Tensor:
        """Places of the states within their micro-batch, by which their rules are found."""
        return torch.arange(len(where), device=self._device)

    def _targets(self, batch: Batch, where: Sequence[tuple[int, int]]) -> Tensor:
        return torch.tensor([batch.sequences[row].tokens[at + 1] for row, at in where], device=self._device)

    def _temperatures(self, batch: Batch, where: Sequence[tuple[int, int]]) -> Tensor:
        """Greedy completions report plain log-probabilities, so 0 counts as 1."""
        values = [batch.sequences[row].temperature or 1.0 for row, _ in where]
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _check(self, sequences: Sequence[TrainingSequence]) -> None:
        for sequence in sequences:
            if self._sight is not None:
                self._sight.check(sequence)
            elif sequence.images:
                raise EngineError(f"a sequence of rollout {sequence.rollout_id} has images, and the model has no sight")
        check_sequences(sequences, self.model.config.get_text_config())
