"""Both decoders give transformers' logits, whatever way the tokens come in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.engines.local.decoder import LlamaDecoder, TransformersDecoder, open_decoder
from agentlightning.engines.local.learner import Learner
from agentlightning.errors import ConfigError, ModelError
from agentlightning.testing.engine_contract import sequence
from build import learner_setup

SCALED: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }
}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any], type]] = [
    ("Llama", {}, LlamaDecoder),
    ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4, "attention_bias": True}, LlamaDecoder),
    ("Llama", SCALED, LlamaDecoder),
    ("Llama", {"hidden_size": 128}, LlamaDecoder),  # heads of 32 numbers: attention fused
    ("Qwen2", {}, LlamaDecoder),
    ("Qwen3", {}, LlamaDecoder),
    ("Qwen3", {"head_dim": 64}, LlamaDecoder),
    ("Mistral", {}, LlamaDecoder),
    ("GPT2", {}, TransformersDecoder),
    ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}, TransformersDecoder),
    ("Llama", {"mlp_bias": True}, TransformersDecoder),
]


@pytest.mark.parametrize(("family", "changes", "kind"), MODELS)
def test_prefill_continuation_and_decoding_give_the_logits_of_transformers(
    build: Callable[..., Path], family: str, changes: dict[str, Any], kind: type
) -> None:
    folder = build(family, **changes)
    decoder = open_decoder(folder)
    assert type(decoder) is kind
    reference = AutoModelForCausalLM.from_pretrained(folder)
    lengths = [23, 9, 17]
    rows = [torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    with torch.inference_mode():
        expected = [reference(input_ids=torch.tensor([row])).logits[0] for row in rows]

    decoder.reserve(8, 24)
    first, prompts = 2, [row[:-6] for row in rows]
    check(decoder, first, prompts, [0, 0, 0], expected)
    decoder.reserve(8, 64)
    check(decoder, first, [row[-6:-2] for row in rows], [len(p) for p in prompts], expected)
    for back in (2, 1):
        check(decoder, first, [[row[-back]] for row in rows], [len(row) - back for row in rows], expected)
    cached = decoder.read(first + 2, lengths[2] - 1)
    decoder.move(first, first + 2, lengths[0] - 1)
    check(decoder, first + 2, [rows[0][-1:]], [lengths[0] - 1], expected[:1])
    decoder.write(first, cached)
    check(decoder, first, [rows[2][-1:]], [lengths[2] - 1], expected[2:])


def check(decoder: Any, first: int, new: list[list[int]], offsets: list[int], expected: list[torch.Tensor]) -> None:
    width = max(map(len, new))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in new])
    take = torch.tensor([len(row) - 1 for row in new])
    found = decoder.extend(first, tokens, torch.tensor(offsets), take)
    for row, logits in enumerate(found):
        torch.testing.assert_close(logits, expected[row][offsets[row] + len(new[row]) - 1], atol=1e-4, rtol=1e-4)


def test_a_windowed_model_is_offered_only_the_context_where_the_window_changes_nothing(
    build: Callable[..., Path],
) -> None:
    assert open_decoder(build("Mistral", sliding_window=96)).context == 96


def test_weights_that_do_not_fit_leave_the_old_ones_in_place(build: Callable[..., Path], llama: Path) -> None:
    decoder = open_decoder(llama)
    decoder.reserve(1, 8)
    before = decoder.extend(0, torch.tensor([[5, 6]]), torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ModelError, match=r"model\.norm\.weight|shape"):
        decoder.load(build("Llama", hidden_size=64))
    after = decoder.extend(0, torch.tensor([[5, 6]]), torch.tensor([0]), torch.tensor([1]))
    assert torch.equal(before, after)


def learner_on(folder: Path, device: str) -> Learner:
    return Learner(folder, learner_setup(device=device))


@pytest.mark.parametrize("opened", [open_decoder, learner_on])
def test_a_device_that_is_not_there_is_one_sentence(build: Callable[..., Path], opened: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"^engine.device: torch cannot use 'cuda:99' on this machine: .+"):
        opened(build("Llama"), device="cuda:99")


def test_a_model_with_a_recurrent_state_is_refused(build: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match="local engine"):
        open_decoder(tmp_path)


@pytest.mark.slow
def test_in_bfloat16_sampler_and_learner_agree_within_a_hundredth_per_token(pretrained: Path) -> None:
    decoder = open_decoder(pretrained, torch.bfloat16)
    ids = torch.randint(100, 40_000, (1, 24), generator=torch.Generator().manual_seed(0))
    decoder.reserve(1, 64)
    logits = decoder.extend(0, ids, torch.tensor([0]), torch.tensor([23]))
    sampled, logprobs = [], []
    noise = torch.Generator().manual_seed(1)
    for at in range(24, 64):
        found = logits.log_softmax(-1)
        token = torch.multinomial(found.exp(), 1, generator=noise)
        sampled.append(int(token))
        logprobs.append(float(found[0, token[0]]))
        logits = decoder.extend(0, token, torch.tensor([at]), torch.tensor([0])) if at < 63 else logits
    learner = Learner(pretrained, learner_setup(dtype="bfloat16", packing="prefix_tree"))
    [known] = learner.logprobs([sequence([*ids[0].tolist(), *sampled], [(24, 64)])])
    ratios = torch.tensor(known[24:]) - torch.tensor(logprobs)
    assert float((ratios.exp() - 1 - ratios).mean()) <= 0.01  # k3, Schulman's estimator of the divergence


@pytest.mark.slow
def test_the_logits_of_a_pretrained_model_are_those_of_transformers(pretrained: Path) -> None:
    decoder, reference = open_decoder(pretrained), AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    row = torch.randint(0, 49_000, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([row])).logits[0]
    decoder.reserve(1, 32)
    for start, end in ((0, 20), (20, 23), (23, 24)):
        check(decoder, 0, [row[start:end]], [start], [expected])
