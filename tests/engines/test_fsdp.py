"""A learner of several ranks against one of one: the same metrics, the same updates, the same folders.

The ranks are forked from a server that has imported torch, so that a group costs a second, not the start of three
processes; how an engine starts and loses them is in test_engine_contract.py.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_learner import batch
from transformers import AutoModelForCausalLM

from agentlightning import errors
from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.model import Hardware
from agentlightning.engines.local.sharding import Ranks
from agentlightning.errors import AgentLightningError, EngineError, ModelError
from agentlightning.runtime.children import listen
from agentlightning.runtime.watchdog import HangLimits
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TrainingSequence
from build import learner_setup

pytestmark = pytest.mark.slow

SFT = Loss(name="sft")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["agentlightning.engines.local.learner", "transformers.models.llama.modeling_llama", "peft"]
)


class Group:
    """Ranks that carry out every call together, and agree on what it gives."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments: self.call(method, *arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self.receive()

    def receive(self) -> Any:
        answers = [pipe.recv() for pipe in self._pipes]
        assert all(answer == answers[0] for answer in answers), "ranks disagree"
        if answers[0][0] == "error":
            raise getattr(errors, answers[0][1])(answers[0][2])
        return answers[0][1]


class OwnBound(Hardware):
    """Free memory that allows micro-batches of 64 tokens."""

    def microbatch_tokens(self, most: int, *_: Any) -> int:
        return 64


class Unequal(Learner):
    """A rank of a larger model, of which the second has less memory than the others."""

    def _packing(self, hardware: Hardware, tiny: bool) -> dict[str, Any]:
        kind = OwnBound if self.ranks.rank == 1 else Hardware
        return super()._packing(kind(device=hardware.device, dtype=hardware.dtype), tiny=False)


@dataclass
class Rank:
    """What a rank's process is made of."""

    ranks: Ranks
    port: int
    listener: Any
    folder: Path
    options: LearnerSetup
    kind: type[Learner]


def be_rank(given: Rank, pipe: Connection) -> None:
    torch.set_num_threads(1)
    given.ranks.meet("cpu", HangLimits(start_timeout_s=120, stall_timeout_s=120), given.port, given.listener)
    learner: Learner | None = None
    while True:
        try:
            if learner is None:
                learner = given.kind(given.folder, given.options, logits_at_once=64 * 20, ranks=given.ranks)
                pipe.send(("ok", None))
            method, arguments = pipe.recv()
            pipe.send(("ok", getattr(learner, method)(*arguments)))
        except EOFError:
            return
        except AgentLightningError as error:
            pipe.send(("error", type(error).__name__, str(error)))
            if learner is None:
                return


@contextmanager
def group(
    folder: Path, options: LearnerSetup | None = None, count: int = 2, kind: type[Learner] = Learner
) -> Iterator[Any]:
    """A Learner of so many ranks: Any, since it has the methods of one."""
    options = options or learner_setup()
    with listen("127.0.0.1", 0) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        pipes = []
        for rank in range(count):
            ours, theirs = FORKS.Pipe()
            given = Rank(Ranks(rank, count), port, None if rank else listener, folder, options, kind)
            process = FORKS.Process(target=be_rank, args=(given, theirs), daemon=True)
            process.start()
            stack.callback(process.join)
            theirs.close()
            stack.callback(ours.close)
            pipes.append(ours)
        made = Group(pipes)
        made.receive()
        yield made


def weights(learner: Any, folder: Path) -> dict[str, torch.Tensor]:
    learner.export(folder)
    return load_file(folder / "model.safetensors")


def updates(learner: Any, count: int = 3, loss: Loss = SFT, rows: list[TrainingSequence] | None = None) -> list[float]:
    found = []
    for _ in range(count):
        found.append(learner.forward_backward(rows or batch(), loss)["loss"])
        found.append(learner.optim_step(1e-3, 1.0)["grad_norm"])
    return found


def norms(metrics: dict[str, float]) -> dict[str, float]:
    """Without the count of the tokens that were computed, of which an empty share has one, too."""
    return {name: value for name, value in metrics.items() if name != "learner_tokens"}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


CASES = {
    "a head of its own": (
        "Llama",
        {"tie_word_embeddings": False},
        learner_setup(optimizer={"type": "adamw", "weight_decay": 0.1}),
    ),
    "no Llama": ("Olmo", {}, learner_setup()),
    "prefix tree": ("Qwen3", {}, learner_setup(packing="prefix_tree")),
    "small batches, layers computed again": (
        "Llama",
        {},
        learner_setup(max_tokens_per_microbatch=100, gradient_checkpointing=True),
    ),
    "LoRA in trees": ("Llama", {}, learner_setup(lora_rank=4, packing="prefix_tree")),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks by the old name
@pytest.mark.parametrize("case", CASES)
def test_updates_and_folders_are_those_of_one_process(build: Callable[..., Path], tmp_path: Path, case: str) -> None:
    family, changes, options = CASES[case]
    folder = build(family, **changes)
    alone = Learner(folder, options)
    expected = updates(alone, loss=Loss(entropy=0.01))
    alone.save(tmp_path / "alone")
    with group(folder, options) as ranks:
        assert updates(ranks, loss=Loss(entropy=0.01)) == pytest.approx(expected, rel=1e-5)
        ranks.save(tmp_path / "ranks")
        one, other = tmp_path / "alone", tmp_path / "ranks"
        assert_same(load_file(one / "model.safetensors"), load_file(other / "model.safetensors"))
        assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
        assert (one / "config.json").read_text() == (other / "config.json").read_text()
        if options.config.lora_rank is not None:
            file = "adapter/adapter_model.safetensors"
            assert_same(load_file(one / file), load_file(other / file))
            whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), other / "adapter")
            tokens = torch.tensor([[4, 5, 6, 7]])
            with torch.inference_mode():
                merged = AutoModelForCausalLM.from_pretrained(other)(tokens).logits
                torch.testing.assert_close(whole(tokens).logits, merged, rtol=1e-4, atol=1e-4)


def test_ranks_whose_free_memory_differs_have_as_many_micro_batches_and_train_the_same_update(llama: Path) -> None:
    options = learner_setup(packing="padded")
    with group(llama, options, kind=Unequal) as ranks:
        assert updates(ranks) == pytest.approx(updates(Learner(llama, options)), rel=1e-5)


@pytest.mark.parametrize("lora", [None, 4])
def test_logprobs_are_those_of_the_weights_of_now_and_the_reference_stays(llama: Path, lora: int | None) -> None:
    options = learner_setup(reference=True, lora_rank=lora)
    alone, rows = Learner(llama, options), batch()
    with group(llama, options) as ranks:
        first = ranks.reference_logprobs(rows)  # before anything else: the adapter is off in the first pass
        for _ in range(2):
            for learner in (ranks, alone):
                learner.forward_backward(rows, SFT)
            before = ranks.logprobs(rows)  # between gradient and update
            assert before == [pytest.approx(found, abs=1e-5) for found in alone.logprobs(rows)]
            for learner in (ranks, alone):
                learner.optim_step(3e-2, 1.0)
            after = ranks.logprobs(rows)
            assert after == [pytest.approx(found, abs=1e-4) for found in alone.logprobs(rows)]
            assert after[0] != pytest.approx(before[0], abs=1e-2)
        assert ranks.reference_logprobs(rows) == first
        assert first == [pytest.approx(found, abs=1e-5) for found in Learner(llama).logprobs(rows)]


def test_preferences_and_values_are_those_of_one_process(llama: Path) -> None:
    options = learner_setup(reference=True, critic=10.0)
    rows = [sequence([3, 4, 5, 6, last, 1], [(4, 6)]) for last in (20, 30, 40)]
    alone = Learner(llama, options)
    known = [replace(row, ref_logprobs=ref) for row, ref in zip(rows, alone.reference_logprobs(rows), strict=True)]
    examples = [Preference(chosen=[known[0]], rejected=[known[1]]), Preference(chosen=[known[2]], rejected=[known[1]])]
    taught = [replace(row, returns=[1.0] * len(row.tokens)) for row in rows]
    with group(llama, options) as ranks:
        for _ in range(3):
            expected = alone.forward_backward_preferences(examples, PreferenceLoss(name="dpo"))
            assert ranks.forward_backward_preferences(examples, PreferenceLoss(name="dpo")) == pytest.approx(expected)
            expected = alone.forward_backward(taught, Loss(name="reinforce", value=0.1))
            assert ranks.forward_backward(taught, Loss(name="reinforce", value=0.1)) == pytest.approx(
                expected, rel=1e-4
            )
            assert norms(ranks.optim_step(1e-3, 1.0)) == pytest.approx(norms(alone.optim_step(1e-3, 1.0)), rel=1e-4)
        assert ranks.values(rows) == [pytest.approx(found, abs=1e-4) for found in alone.values(rows)]


@pytest.mark.parametrize(("optimizer", "lora"), [("adamw", None), ("adamw", 4), ("muon", None)])
def test_training_after_a_checkpoint_goes_on_bit_for_bit_and_with_another_number_of_ranks(
    llama: Path, tmp_path: Path, optimizer: Any, lora: int | None
) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "lora_rank": lora, "critic": 1.0}
    options = learner_setup(**settings)
    with group(llama, learner_setup(**settings, dropout=0.1)) as ranks:
        updates(ranks, 1)
        ranks.save(tmp_path / "noisy")
        expected = updates(ranks, 2)
        expected_weights = weights(ranks, tmp_path / "expected")
        ranks.load(tmp_path / "noisy")
        assert updates(ranks, 2) == expected
        assert_same(weights(ranks, tmp_path / "again"), expected_weights, atol=0)
        ranks.load(tmp_path / "noisy")
        ranks.save(tmp_path / "two")
    alone = Learner(llama, options)
    alone.load(tmp_path / "two")
    alone.save(tmp_path / "one")
    # Muon's updates are computed in bfloat16: another order of additions is another rounding.
    atol = 1e-3 if optimizer == "muon" else 1e-5
    with group(llama, options) as ranks:
        ranks.load(tmp_path / "one")
        assert updates(ranks) == pytest.approx(updates(alone), rel=1e-3 if optimizer == "muon" else 1e-5)
        assert_same(weights(ranks, tmp_path / "ranks"), weights(alone, tmp_path / "alone"), atol)
        with pytest.raises(ModelError, match=r"no learner\.pt"):
            ranks.load(llama)
        assert updates(ranks, 1)


def test_an_error_of_one_rank_is_an_error_of_all_and_they_go_on(llama: Path, tmp_path: Path) -> None:
    rows = [replace(row, ref_logprobs=row.logprobs) for row in batch(4)]
    file = tmp_path / "own_loss.py"
    file.write_text(
        "def picky(logprobs, tokens):\n    assert len(logprobs) < 6, 'too many tokens'\n    return -logprobs\n"
    )
    longer = sequence(rows[0].tokens, [(1, 8)])
    with group(llama) as ranks:
        ranks.save(tmp_path / "fresh")
        with pytest.raises(EngineError, match="its sequences have no ref_logprobs"):
            ranks.forward_backward([rows[0], replace(rows[1], ref_logprobs=None)], Loss(kl=0.1))
        with pytest.raises(AgentLightningError, match="too many tokens"):
            ranks.forward_backward([rows[0], longer], Loss(name=f"{file}:picky"))
        ranks.load(tmp_path / "fresh")
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(EngineError, match="cannot be written"):
            ranks.save(tmp_path / "file" / "checkpoint")
        assert updates(ranks) == pytest.approx(updates(Learner(llama)), rel=1e-5)


@pytest.mark.parametrize("packing", ["padded", "prefix_tree"])
def test_with_fewer_sequences_than_ranks_the_others_go_along(llama: Path, tmp_path: Path, packing: Any) -> None:
    options = learner_setup(packing=packing, critic=2.0)
    row = replace(batch(1)[0], returns=[1.0] * len(batch(1)[0].tokens))
    alone = Learner(llama, options)
    with group(llama, options, count=3) as ranks:
        for rows in ([row], [row, row], [sequence([3, 4, 5], [])], []):
            loss = Loss(name="reinforce", value=0.1)
            assert ranks.forward_backward(rows, loss) == pytest.approx(alone.forward_backward(rows, loss), rel=1e-5)
            assert ranks.logprobs(rows) == [pytest.approx(found, abs=1e-5) for found in alone.logprobs(rows)]
            assert norms(ranks.optim_step(1e-3, 1.0)) == pytest.approx(norms(alone.optim_step(1e-3, 1.0)), rel=1e-4)
        assert_same(weights(ranks, tmp_path / "ranks"), weights(alone, tmp_path / "alone"))


@pytest.mark.parametrize("lora", [None, 4])
def test_bfloat16_computes_close_to_float32_and_keeps_float32(llama: Path, tmp_path: Path, lora: int | None) -> None:
    settings: dict[str, Any] = {"gradient_checkpointing": True, "reference": True, "lora_rank": lora}
    options = learner_setup(dtype="bfloat16", **settings)
    alone = Learner(llama, learner_setup(**settings))
    with group(llama, options) as ranks:
        ranks.reference_logprobs(batch())
        assert updates(ranks) == pytest.approx(updates(alone), rel=0.05)
        ranks.save(tmp_path / "ranks")
    kept = tmp_path / "ranks" / ("adapter/adapter_model.safetensors" if lora else "model.safetensors")
    for value in load_file(kept).values():
        assert value.dtype == torch.float32
        assert not torch.equal(value, value.bfloat16().float())
