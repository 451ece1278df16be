"""Importing models: a GGUF file becomes a folder with the same numbers, and says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentlightning.engines.folders import damage
from agentlightning.engines.import_model import SOURCE_FILE, import_model
from agentlightning.errors import AgentLightningError, ConfigError, ModelError

VOCABULARY = 64
HEADS = 2
Q8 = gguf.GGMLQuantizationType.Q8_0
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def a_model() -> LlamaForCausalLM:
    """A llama of one layer whose matrices are those that 8 bits leave."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(quantized(parameter), Q8)))
    return model


def quantized(parameter: torch.Tensor) -> Any:
    return gguf.quants.quantize(parameter.detach().numpy(), Q8)


def write_gguf(model: LlamaForCausalLM, file: Path) -> None:
    """The model as llama.cpp keeps it: 8 bits, and the rows of queries and keys in pairs."""
    writer = gguf.GGUFWriter(file, "llama")
    config = model.config
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_source_url("https://models.example/tiny")
    writer.add_block_count(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        [b"<unk>", b"<s>", b"</s>", *(bytes([33 + number]) for number in range(VOCABULARY - 4)), b"!A"]
    )
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCABULARY - 3))
    writer.add_token_merges(["! A"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    for name, value in state.items():
        if name == "lm_head.weight":
            continue
        target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(name)
        if target is None:
            target = f"blk.0.{NAMES[name.removeprefix('model.layers.0.').removesuffix('.weight')]}.weight"
        if target.endswith(("attn_q.weight", "attn_k.weight")):
            rows, columns = value.shape
            value = value.reshape(HEADS, 2, rows // HEADS // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        if value.dim() == 2:
            writer.add_tensor(target, quantized(value.contiguous()), raw_dtype=Q8)
        else:
            writer.add_tensor(target, value.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_quantised_file_becomes_a_folder_with_the_same_logits(tmp_path: Path) -> None:
    model = a_model()
    write_gguf(model, tmp_path / "Tiny.Q8_0.gguf")
    import_model(str(tmp_path / "Tiny.Q8_0.gguf"), tmp_path / "models" / "tiny")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "tiny", dtype=torch.float32)
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        expected = model.to(torch.bfloat16).to(torch.float32)(ids).logits
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "tiny")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.convert_ids_to_tokens([2, 3]) == ["</s>", "!"]


def test_an_imported_folder_names_its_source_its_licence_and_what_was_lost(tmp_path: Path) -> None:
    write_gguf(a_model(), tmp_path / "Tiny.Q8_0.gguf")
    found = import_model(str(tmp_path / "Tiny.Q8_0.gguf"), tmp_path / "tiny")
    recorded = json.loads((tmp_path / "tiny" / SOURCE_FILE).read_bytes())
    assert recorded == {
        "source": "Tiny.Q8_0.gguf",
        "sha256": found.sha256,
        "license": "apache-2.0",
        "name": "Tiny",
        "url": "https://models.example/tiny",
        "quantization": ["Q8_0"],
        "base": None,
    }
    assert damage(tmp_path / "tiny") is None


def test_a_model_folder_is_copied_with_the_licence_of_its_card(tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path / "here")
    (tmp_path / "here" / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# A model\nlicense: none\n")
    (tmp_path / "here" / "optimizer.pt").write_bytes(b"not a part of the model")
    found = import_model(str(tmp_path / "here"), tmp_path / "copy")
    assert found.license == "mit"
    assert not (tmp_path / "copy" / "optimizer.pt").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "copy").config.vocab_size == VOCABULARY


@pytest.mark.parametrize(
    ("source", "kind", "sentence"),
    [
        ("nothing.gguf", ModelError, "there is no such file"),
        ("half.gguf", ModelError, "not a whole GGUF file"),
        ("text.gguf", ModelError, "not a whole GGUF file"),
        ("empty", ModelError, "it has no config.json"),
        ("model.bin", ConfigError, "SOURCE: expected a .gguf file, a folder or hub:NAME, got"),
    ],
)
def test_what_is_no_model_is_named_and_leaves_nothing(
    source: str, kind: type[AgentLightningError], sentence: str, tmp_path: Path
) -> None:
    write_gguf(a_model(), tmp_path / "whole.gguf")
    (tmp_path / "half.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:-5000])
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "empty").mkdir()
    with pytest.raises(kind, match=sentence):
        import_model(str(tmp_path / source), tmp_path / "models" / "made")
    assert not (tmp_path / "models").exists() or not list((tmp_path / "models").iterdir())


def test_a_folder_that_exists_is_never_written_into(tmp_path: Path) -> None:
    write_gguf(a_model(), tmp_path / "tiny.gguf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ConfigError, match="mine: exists and is not an empty folder"):
        import_model(str(tmp_path / "tiny.gguf"), tmp_path / "mine")
