"""Renderer.encode tokenises by stretches: always what the tokenizer makes of the whole text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentlightning.rendering.renderer import MAX_TEXT, Renderer, RenderError, check_text

WORDS = ["user", " user", "\n", "  \n ", "Hello there", ".", "x", "é🙂", "<|im", "_start|>", "<s", ">", "[x]", "▁", ""]
TOKENS = ["<|im_start|>", "<|im_end|>", "<s>", "<s>>", "[[x]]", "[x]", "<tool>"]

BYTES = (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), None)
PREFIXED = (pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel(), None)
FIRST = (pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace(), None)
ALWAYS = (pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace(), normalizers.Prepend("▁"))


TOKENIZERS = {"bytes": BYTES, "prefixed": PREFIXED, "first": FIRST, "always": ALWAYS}
KINDS = [*((name, "") for name in TOKENIZERS), *(("bytes", taking) for taking in ("lstrip", "rstrip", "single_word"))]
KINDS += [("always", "lstrip")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Renderer, Tokenizer]:
    """A renderer and a tokenizer of each kind; one of its added tokens takes white space, or is found between words only."""
    name, taking = request.param
    before, decoder, normalizer = TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = before, decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["Hello there user, <|im_start|> x [x] " * 9], trainer)
    tokenizer.add_special_tokens([AddedToken(TOKENS[0], normalized=False, **({taking: True} if taking else {}))])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in TOKENS[1:-1]])
    tokenizer.add_tokens([AddedToken(TOKENS[-1], normalized=True)])
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(made / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    return Renderer(made), tokenizer


@given(text=st.lists(st.sampled_from(WORDS + TOKENS) | st.text(max_size=5), max_size=12).map("".join))
def test_a_text_is_tokenised_as_the_tokenizer_does_it_in_one_piece(both: tuple[Renderer, Tokenizer], text: str) -> None:
    renderer, tokenizer = both
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert renderer.encode(text) == whole
    assert renderer.encode(text) == whole  # from the cache


@given(text=st.lists(st.sampled_from(WORDS + TOKENS), max_size=12).map("".join))
def test_what_follows_a_special_token_is_tokenised_as_after_it(both: tuple[Renderer, Tokenizer], text: str) -> None:
    renderer, tokenizer = both
    end = tokenizer.token_to_id("<|im_end|>")
    whole = tokenizer.encode("<|im_end|>" + text, add_special_tokens=False).ids
    assert [end, *renderer.encode(text, after=end)] == whole


def test_a_text_that_would_take_the_tokenizer_seconds_is_refused(both: tuple[Renderer, Tokenizer]) -> None:
    with pytest.raises(RenderError, match="expected at most"):
        both[0].encode("x" * (MAX_TEXT + 1))


def test_the_texts_of_messages_and_tools_are_bounded_before_anything_is_made_of_them() -> None:
    half = "x" * (MAX_TEXT // 2)
    told = {"role": "user", "content": [{"type": "text", "text": half}]}
    check_text([told], None)
    for messages, tools in ([told, told], None), ([told], [{"function": {"description": half}}]):
        with pytest.raises(RenderError, match="expected at most 2097152"):
            check_text(messages, tools)
