"""What a configuration leaves open is chosen by the model's size and the algorithm, said, and recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentlightning.config.run import Config, config_text, parse_config
from agentlightning.engines.folders import ModelSize, model_size
from agentlightning.engines.machine import Machine
from agentlightning.errors import ConfigError
from agentlightning.trainer.defaults import FoundModel, choose, find_models, with_defaults
from agentlightning.trainer.policies import policy_configs, schedule_configs
from agentlightning.trainer.schedules import inherited, schedules_of

TINY = ModelSize(parameters=200_000, context=256)
SMALL = ModelSize(parameters=134_515_008, context=8192)
REAL = ModelSize(parameters=494_032_768, context=32768)
LARGE = ModelSize(parameters=7_615_616_512, context=32768)
UNKNOWN = ModelSize(parameters=None, context=2048)


def config(**tables: Any) -> Config:
    least = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
    return parse_config({**least, **tables})


def offline(kind: str, **tables: Any) -> Config:
    return parse_config(
        {"model": {"path": "m"}, "data": {"from_run": "r"}, "algorithm": {"type": kind}, **tables},
    )


def write_model(folder: Path, parameters: int, context: int = 1024) -> Path:
    """A folder whose weights are a header alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [parameters, 1], "data_offsets": [0, 4 * parameters]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


LORA = {"engine": {"lora_rank": 16}}


@pytest.mark.parametrize(
    ("given", "size", "rate"),
    [
        (config(), SMALL, 3e-5),
        (config(), REAL, 1e-5),
        (config(), LARGE, 1e-6),
        (config(), UNKNOWN, 1e-6),
        (config(**LORA), SMALL, 3e-4),
        (config(**LORA), LARGE, 1e-5),
        (offline("dpo"), REAL, 5e-7),
        (offline("kto", **LORA), REAL, 5e-6),
        (offline("sft"), REAL, 1e-5),
        (offline("rft"), REAL, 1e-5),
        (offline("distill", **LORA), REAL, 1e-4),
        (config(), TINY, 1e-5),
        (offline("dpo"), TINY, 1e-5),
        (config(trainer={"learning_rate": 3e-5}), REAL, 3e-5),
    ],
)
def test_the_learning_rate_goes_by_model_and_algorithm(given: Config, size: ModelSize, rate: float) -> None:
    assert choose(given, size)[0].trainer.learning_rate == rate


@pytest.mark.parametrize(
    ("size", "minibatches", "betas", "dual_clip", "cap"),
    [(TINY, 4, (0.9, 0.95), None, None), (REAL, 1, (0.9, 0.999), 3.0, 8192), (UNKNOWN, 1, (0.9, 0.999), 3.0, 1024)],
)
def test_the_other_settings_go_by_the_model(
    size: ModelSize, minibatches: int, betas: tuple[float, float], dual_clip: float | None, cap: int | None
) -> None:
    chosen, _ = choose(config(), size)
    [[part]] = schedules_of(chosen).values()
    assert part.algorithm.minibatches == minibatches  # type: ignore[union-attr]
    assert part.algorithm.loss_terms.dual_clip == dual_clip  # type: ignore[union-attr]
    assert chosen.engine.optimizer.betas == betas
    assert chosen.model.max_tokens == cap


@pytest.mark.parametrize("size", [TINY, REAL])
def test_what_is_given_stays_and_what_is_chosen_is_not_chosen_again(size: ModelSize) -> None:
    given = config(
        model={"path": "m", "max_tokens": 77},
        algorithm={"minibatches": 2, "loss": {"dual_clip": 5.0}},
        trainer={"learning_rate": 0.5},
        engine={"optimizer": {"betas": [0.8, 0.9]}},
    )
    kept, told = choose(given, size)
    assert (config_text(kept), told) == (config_text(given), [])
    once, told = choose(config(), size)
    recorded = parse_config(json.loads(config_text(once)))
    again, nothing = choose(recorded, size)
    assert told
    assert (config_text(again), nothing) == (config_text(once), [])


@pytest.mark.parametrize(
    "algorithm", [{"loss": "reinforce"}, {"loss": "gspo"}, {"loss": {"clip_high": 2.5}}, {"advantage": "gae"}]
)
@pytest.mark.parametrize("size", [TINY, REAL])
def test_whatever_is_chosen_goes_together_with_what_is_given(size: ModelSize, algorithm: dict[str, Any]) -> None:
    chosen, _ = choose(config(algorithm=algorithm), size)
    assert schedules_of(chosen)


def test_each_part_of_a_schedule_has_the_learning_rate_of_its_algorithm() -> None:
    schedule = [{"from_step": 2, "type": "lightning_rl"}, {"from_step": 3, "learning_rate": 0.5}]
    given = config(
        data={"train": "t", "from_run": "r"}, algorithm={"type": "sft", "schedule": schedule}, trainer={"steps": 4}
    )
    chosen, _ = choose(given, REAL)
    parts = [part for _, part in schedule_configs(chosen)]
    assert [part.trainer.learning_rate for part in parts] == [1e-5, 1e-5, 0.5]
    assert parts[1].algorithm["minibatches"] == 1


def test_what_was_chosen_is_said_with_the_reason() -> None:
    assert choose(config(), REAL)[1] == [
        "chosen: trainer.learning_rate = 1e-05 (lightning_rl of all weights, 494 million parameters)",
        "chosen: algorithm.minibatches = 1, algorithm.loss.dual_clip = 3.0, engine.optimizer.betas = [0.9, 0.999] "
        "(494 million parameters)",
        "chosen: model.max_tokens = 8192 (of a completion, at most; the model's context holds 32768)",
    ]
    assert choose(config(), TINY)[1] == [
        "chosen: trainer.learning_rate = 1e-05 (lightning_rl of all weights, 0.2 million parameters)",
        "chosen: algorithm.minibatches = 4, engine.optimizer.betas = [0.9, 0.95] (a tiny model, 0.2 million parameters)",
    ]
    assert choose(offline("dpo", **LORA), REAL)[1][0] == (
        "chosen: trainer.learning_rate = 5e-06 (dpo of an adapter, 494 million parameters)"
    )


CPU = Machine(
    device="cpu",
    dtype="float32",
    sampler_threads=1,
    learner_threads=2,
    cores=4,
    free_bytes=8 * 10**9,
    cache_bytes=4 * 10**9,
    flops=1e11,
)
GPU = replace(CPU, device="cuda", dtype="bfloat16", free_bytes=80 * 10**9)


@pytest.mark.parametrize(
    ("given", "machine", "tasks"),
    [
        (config(), CPU, 8),
        (config(), GPU, 32),
        (config(trainer={"tasks_per_step": 32}), CPU, 32),
        (config(policies={"a": {}, "b": {}}), CPU, 8),
    ],
)
async def test_steps_on_a_cpu_are_smaller_unless_their_size_is_given(
    tmp_path: Path, given: Config, machine: Machine, tasks: int
) -> None:
    model = FoundModel(folder=write_model(tmp_path / "m", SMALL.parameters or 0), size=SMALL, machine=machine)
    notes: list[str] = []
    chosen = await with_defaults(given, notes.append, dict.fromkeys(policy_configs(given), model))
    assert chosen.trainer.tasks_per_step == tasks
    assert any("trainer.tasks_per_step = 8 (on a CPU" in note for note in notes) == (
        "tasks_per_step" not in given.trainer.model_fields_set and machine.cpu
    )
    recorded = parse_config(json.loads(config_text(chosen)))
    assert (await with_defaults(recorded, notes.append, dict.fromkeys(policy_configs(given), model))) == recorded
    assert choose(given, REAL, CPU)[0].model.max_tokens == 1024


async def test_the_first_notes_are_model_device_and_memory(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", 134_515_008, 8192)
    table = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, **table}))
    notes: list[str] = []
    await with_defaults(config(), notes.append, {"default": FoundModel(folder=folder, size=SMALL, machine=CPU)})
    # Learner: .5 GB, 16 bytes a parameter, and 256 tokens (the fewest; a 24th of 8 GB holds 193) x 30 layers x 576 x 25
    # numbers of 4 bytes. Sampler: .5 GB, its weights twice and the bound of its cache.
    assert notes[:2] == [
        "model: 135 million parameters; device cpu (auto), float32 (auto); threads: sampler 1, learner 2, of 4 cores",
        "memory: about 8.7 GB at most (learner 3.1, sampler 5.6), 8.0 GB free: lower it with "
        "engine.gradient_checkpointing = true or engine.max_num_seqs, or engine.lora_rank = 16",
    ]
    await with_defaults(config(), notes.append, {"default": FoundModel(folder=folder, size=SMALL, machine=GPU)})
    assert [note for note in notes if note.startswith("memory")][1].endswith(", 80.0 GB free")


@pytest.mark.slow
async def test_a_real_model_is_measured_for_in_a_process_that_loads_torch(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", 20_000_000)
    (found,) = (await find_models(config(model={"path": str(folder)}, engine={"device": "cpu"}))).values()
    assert found.machine is not None
    assert (found.machine.device, found.machine.cpu) == ("cpu", True)
    assert found.machine.flops > 1e8
    assert found.machine.free_bytes > 0
    with pytest.raises(ConfigError, match=r"engine.device: torch cannot use 'nowhere' on this machine"):
        await find_models(config(model={"path": str(folder)}, engine={"device": "nowhere"}))
    tiny = write_model(tmp_path / "tiny", 20_000)
    (found,) = (await find_models(config(model={"path": str(tiny)}))).values()
    assert found.machine is None


async def test_policies_of_two_sizes_have_defaults_of_their_own(tmp_path: Path) -> None:
    big, small = write_model(tmp_path / "big", 200_000_000), write_model(tmp_path / "small", 100_000)
    given = config(
        model={"path": str(big)},
        policies={"writer": {}, "critic": {"model": str(small), "algorithm": {"entropy": 0.1}}},
    )
    notes: list[str] = []
    models = {
        alias: FoundModel(folder=folder, size=model_size(folder), machine=None)
        for alias, folder in (("writer", big), ("critic", small))
    }
    chosen = policy_configs(parse_config(json.loads(config_text(await with_defaults(given, notes.append, models)))))
    assert {alias: own.trainer.learning_rate for alias, own in chosen.items()} == {"writer": 3e-5, "critic": 1e-5}
    assert {alias: own.algorithm["minibatches"] for alias, own in chosen.items()} == {"writer": 1, "critic": 4}
    assert chosen["critic"].algorithm["entropy"] == 0.1
    assert chosen["writer"].engine.optimizer.betas == (0.9, 0.999)
    assert {note.partition(":")[0] for note in notes} == {"writer", "critic"}


def test_the_size_of_a_model_is_that_of_its_weights_and_unknown_where_they_are_damaged(tmp_path: Path) -> None:
    assert model_size(write_model(tmp_path / "m", 12_345)) == ModelSize(parameters=12_345, context=1024)
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\xff" * 20)
    assert model_size(tmp_path / "m") == ModelSize(parameters=None, context=1024)


@pytest.mark.parametrize(("parameters", "rate"), [(200_000, 1e-3), (400_000_000, None)])
def test_an_offline_run_takes_the_learning_rate_of_its_source_where_the_model_is_tiny(
    tmp_path: Path, parameters: int, rate: float | None
) -> None:
    source = config(model={"path": str(write_model(tmp_path / "m", parameters))}, trainer={"learning_rate": 1e-3})
    assert inherited(json.loads(config_text(source)))["trainer"].get("learning_rate") == rate
