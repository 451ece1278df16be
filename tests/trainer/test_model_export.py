"""Exported versions load in the libraries that they are for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentlightning.engines.folders import seal
from agentlightning.records import Checkpoint
from agentlightning.store.models import ModelVersion
from agentlightning.trainer.checkpoint_files import weights_of
from agentlightning.trainer.model_weights import export_version, version_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # which peft asks for
]


def test_transformers_loads_the_folder_and_peft_the_adapter(tmp_path: Path) -> None:
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    saved, base = tmp_path / "step-000010", tmp_path / "base"
    model.save_pretrained(base)
    model.save_pretrained(saved)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    tuned.save_pretrained(saved / "adapter")
    (saved / "learner.pt").write_bytes(b"state")
    seal(saved)
    checkpoint = Checkpoint(run_id="r", step=10, path=str(saved), version=11)
    version = ModelVersion(
        name="support",
        number=10,
        run_id="r",
        policy="default",
        step=10,
        resource_version=11,
        parent=str(base),
        base_model=str(base),
        weights=weights_of(checkpoint, saved),
    )
    assert version.weights["kind"] == "adapter"
    folder = asyncio.run(version_folder(version, tmp_path / "runs"))

    whole = LlamaForCausalLM.from_pretrained(export_version(version, folder, tmp_path / "hf", "hf"))
    adapter = export_version(version, folder, tmp_path / "peft", "peft")
    over = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), str(adapter))

    ids = torch.tensor([[1, 2, 3]])
    assert torch.allclose(whole(ids).logits, over(ids).logits, atol=1e-5)
    assert not (tmp_path / "hf" / "learner.pt").exists()
