"""Offline training of a model with sight: the images of recorded calls reach its learner."""

from __future__ import annotations

import io
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image
from record_doubles import SOURCE, STEPS, ComparingEngine, loop, record

from agentlightning.algorithms.offline import DPO, KTO, SFT, OfflineAlgorithm
from agentlightning.records import ImageSpan
from agentlightning.rendering.images import ImageProcessor
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TrainingSequence
from build import learner_setup


class SightedEngine(ComparingEngine):
    """Remembers as before, and computes with a real learner."""

    def __init__(self, folder: Path) -> None:
        from agentlightning.engines.local.learner import Learner

        super().__init__()
        self.learner = Learner(folder, learner_setup(reference=True))

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, policy: str = "default"
    ) -> dict[str, float]:
        await super().forward_backward(sequences, loss, policy)
        return self.learner.forward_backward(sequences, loss)

    async def forward_backward_preferences(
        self,
        examples: Sequence[Preference],
        loss: PreferenceLoss,
        mismatched: Sequence[Sequence[TrainingSequence]] = (),
        policy: str = "default",
    ) -> dict[str, float]:
        await super().forward_backward_preferences(examples, loss, mismatched, policy)
        return self.learner.forward_backward_preferences(examples, loss, mismatched)

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str = "default") -> list[list[float]]:
        return self.learner.logprobs(sequences)

    async def reference_logprobs(
        self, sequences: Sequence[TrainingSequence], policy: str = "default"
    ) -> list[list[float]]:
        return self.learner.reference_logprobs(sequences)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agentlightning.demo import tiny_model, tiny_vision

    folder = tmp_path_factory.mktemp("sight")
    tiny_vision.write(folder, tiny_model.word_tokenizer([], ["red", "blue"], min_times_seen=1), hidden=16, layers=1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [SFT(), DPO(), KTO()], ids=lambda algorithm: algorithm.name)
async def test_the_images_of_recorded_calls_are_learned_from(
    algorithm: OfflineAlgorithm, folder: Path, tmp_path: Path
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(file, "PNG")
    data = file.getvalue()
    processor = ImageProcessor.find(folder)
    assert processor is not None
    placeholders = processor.expansion(data)
    span = ImageSpan(hash=sha256(data).hexdigest(), start=1, end=1 + len(placeholders))
    call = {"suffix_ids": [1, *placeholders, 5], "prompt_tokens": 2 + len(placeholders), "images": [span]}
    engine = SightedEngine(folder)
    async with InMemoryLightningStore() as store:
        await store.create_run("test", {}, "run")
        for rollout_id in await record(store, calls=[call]):
            await store.put_files(SOURCE, rollout_id, {span.hash: data})
        assert await loop(store, engine, tmp_path, algorithm).run(resume=False) == STEPS
    assert len(engine.updates) == STEPS
    learned = {name for name, one in engine.learner.model.named_parameters() if one.grad is not None and one.grad.any()}
    assert any("multi_modal_projector" in name for name in learned)
