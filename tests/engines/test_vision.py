"""Models with sight in the local engine: sampler and learner read a picture alike, and as transformers does."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Gemma2Config,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PixtralVisionConfig,
)

from agentlightning.adapters.sequences import merge
from agentlightning.config.engine import EngineConfig
from agentlightning.demo import tiny_model, tiny_vision
from agentlightning.engines.local.decoder import Decoder, open_decoder
from agentlightning.engines.local.images import PlacedPrompt, read_images
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.sampler import create_app, open_sampler
from agentlightning.engines.local.scheduler import SamplingRequest, Scheduler
from agentlightning.engines.local.sharding import Ranks
from agentlightning.errors import EngineError, InputError, ModelError
from agentlightning.rendering.images import ImageProcessor
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import ImageInput, Loss, TrainingSequence
from build import learner_setup, transition

WORDS = ["red", "blue", "what", "is", "it", "?"]
PROMPT = "<|user|><image>what is it ?<|end|><|assistant|>"
TOKENS = 4


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 24), colour).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


def part(data: bytes) -> dict[str, str]:
    return {"type": "image_url", "url": "data:image/png;base64," + base64.b64encode(data).decode()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight")
    tiny_vision.write(folder, tiny_model.word_tokenizer([], WORDS, min_times_seen=1), hidden=32, layers=2)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(folder)


def ids(processor: Any, text: str) -> list[int]:
    found: list[int] = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def placed_in(decoder: Decoder, prompt: list[int], parts: Any) -> PlacedPrompt:
    assert decoder.images is not None
    return decoder.images.place(prompt, read_images(parts), decoder.context)


def sampled(folder: Path, prompt: list[int], pictures: list[bytes], scheduler: Scheduler | None = None) -> Any:
    """The request after it was sampled to its end, and the prompt as the processor writes it."""
    scheduler = scheduler or Scheduler(open_decoder(folder), max_num_seqs=4, decode_text=lambda _: "")
    placed = placed_in(scheduler._decoder, prompt, [part(data) for data in pictures])
    request = SamplingRequest(prompt=placed.ids, max_tokens=5, seed=3, images=placed.images)
    scheduler.submit(request)
    while not request.finish:
        scheduler.turn()
    return request, placed.shown


def row(tokens: list[int], start: int, spans: list[tuple[int, bytes]]) -> TrainingSequence:
    """A sequence whose tokens from `start` on are trained, with pictures at the places named."""
    return sequence(tokens, [(start, len(tokens))], images=[image(at, data) for at, data in spans])


def image(start: int, data: bytes) -> ImageInput:
    return ImageInput(hash=sha256(data).hexdigest(), start=start, end=start + TOKENS, data=data)


def test_the_decoder_reads_a_picture_as_transformers_does(folder: Path, processor: Any) -> None:
    decoder = open_decoder(folder)
    decoder.reserve(2, 32)
    prompts = [placed_in(decoder, ids(processor, PROMPT), [part(data)]) for data in (RED, BLUE)]
    rows = [prompt.ids for prompt in prompts]
    last = torch.tensor([len(rows[0]) - 1] * 2)
    found = decoder.extend(0, torch.tensor(rows), torch.zeros(2, dtype=torch.long), last)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    for place, (data, prompt) in enumerate(zip((RED, BLUE), prompts, strict=True)):
        pictures = [Image.open(io.BytesIO(data)).convert("RGB")]
        inputs = processor(images=pictures, text=[PROMPT], return_tensors="pt", add_special_tokens=False)
        assert inputs["input_ids"][0].tolist() == prompt.shown
        with torch.no_grad():
            logits = model(input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"]).logits[0, -1]
        assert torch.allclose(found[place], logits, atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-3), "the picture changes what is said"


def test_the_learner_finds_the_samplers_logprobs_over_two_pictures(folder: Path, processor: Any) -> None:
    prompt = ids(processor, PROMPT + "red<|end|>" + PROMPT)
    request, shown = sampled(folder, prompt, [RED, BLUE])
    placeholder = ids(processor, "<image>")[0]
    places = [at for at, token in enumerate(shown) if token == placeholder][::TOKENS]
    whole = row(shown + request.sampled, len(shown), list(zip(places, (RED, BLUE), strict=True)))
    shorter = row(shown[: places[1]], places[1] - 1, [(places[0], RED)])
    [found, _] = Learner(folder).logprobs([whole, shorter])
    assert found[len(shown) :] == pytest.approx(request.logprobs, abs=1e-5)


@pytest.fixture(scope="module")
def gemma(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tower over a language model whose logits are capped, which no decoder of ours is written for."""
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("gemma") / "model")
    config = LlavaConfig.from_pretrained(copy)
    old = config.text_config
    config.text_config = Gemma2Config(
        vocab_size=old.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, max_position_embeddings=256, initializer_range=0.3,
        final_logit_softcapping=2.0, bos_token_id=None, eos_token_id=old.eos_token_id, pad_token_id=old.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(copy)
    return copy


def test_any_language_model_may_read_the_pictures_and_learner_and_sampler_agree(gemma: Path, processor: Any) -> None:
    request, shown = sampled(gemma, ids(processor, PROMPT), [RED])  # the decoder has compared itself with transformers
    [found] = Learner(gemma).logprobs([row(shown + request.sampled, len(shown), [(1, RED)])])
    assert found[len(shown) :] == pytest.approx(request.logprobs, abs=1e-4)


def test_prefixes_of_different_pictures_are_kept_apart(folder: Path, processor: Any) -> None:
    scheduler = Scheduler(open_decoder(folder), max_num_seqs=4, decode_text=lambda _: "")
    prompt = ids(processor, PROMPT + "red<|end|>" * 20 + "<|assistant|>")
    apart = [sampled(folder, prompt, [data])[0].logprobs for data in (RED, BLUE)]
    shared = [sampled(folder, prompt, [data], scheduler)[0].logprobs for data in (RED, BLUE, RED)]
    assert shared[0] == pytest.approx(apart[0], abs=1e-5)
    assert shared[1] == pytest.approx(apart[1], abs=1e-5)
    assert shared[2] == pytest.approx(apart[0], abs=1e-5)


def test_projector_and_language_model_learn_and_the_tower_stays(folder: Path, processor: Any) -> None:
    tokens = ImageProcessor.find(folder)
    assert tokens is not None
    shown = [
        i for one in ids(processor, PROMPT) for i in (tokens.expansion(RED) if one == tokens.placeholder_id else [one])
    ]
    learner = Learner(folder)
    learner.forward_backward([row([*shown, *ids(processor, "red")], len(shown), [(1, RED)])], Loss(name="sft"))
    moved = {name for name, each in learner.model.named_parameters() if each.grad is not None and each.grad.any()}
    assert any("multi_modal_projector" in name for name in moved)
    assert any("language_model" in name for name in moved)
    assert not any("vision_tower" in name for name in moved)


def test_a_sampler_takes_published_weights_for_pictures_it_has_seen(
    folder: Path, processor: Any, tmp_path: Path
) -> None:
    scheduler = Scheduler(open_decoder(folder), max_num_seqs=4, decode_text=lambda _: "")
    request, shown = sampled(folder, ids(processor, PROMPT), [RED], scheduler)
    learner = Learner(folder)
    trained = row([*shown, *ids(processor, "red")], len(shown), [(1, RED)])
    learner.forward_backward([trained], Loss(name="sft"))
    learner.optim_step(1e-2, 1.0)
    learner.export(tmp_path / "new")
    scheduler.load(tmp_path / "new", "1")
    request, shown = sampled(folder, ids(processor, PROMPT), [RED], scheduler)
    [found] = learner.logprobs([row(shown + request.sampled, len(shown), [(1, RED)])])
    assert found[len(shown) :] == pytest.approx(request.logprobs, abs=1e-5)


def test_exported_weights_have_the_names_of_published_checkpoints_which_vllm_asks_for(
    folder: Path, tmp_path: Path
) -> None:
    Learner(folder).export(tmp_path / "new")
    first, exported = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "new"))
    assert exported.keys() == first.keys()
    assert any(name.startswith("vision_tower.vision_model.encoder.") for name in exported)
    assert all(torch.equal(first[name], exported[name]) for name in first)


def test_merged_rows_have_every_picture_at_its_place() -> None:
    first = transition("a", suffix_ids=[1, 9, 9, 9, 9], sampled_ids=[2], images=[image(1, RED)])
    second = transition("b", suffix_ids=[3, 9, 9, 9, 9], sampled_ids=[4], images=[image(1, BLUE)], parent=first)
    [merged] = merge("r", [first, second], [1.0, 1.0], [1.0, 1.0])
    assert [(one.start, one.end, one.data) for one in merged.images] == [(1, 5, RED), (7, 11, BLUE)]
    _, alone = merge("r", [first, second], [1.0, 1.0], [1.0, 1.0], apart=True)
    assert [(one.start, one.end) for one in alone.images] == [(1, 5), (7, 11)]


def test_settings_that_do_not_fit_a_model_with_sight_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"packing = 'prefix_tree' does not fit"):
        Learner(folder, learner_setup(packing="prefix_tree"))
    with pytest.raises(ModelError, match=r"engine.lora_rank does not fit a model with sight"):
        Learner(folder, learner_setup(lora_rank=4))
    with pytest.raises(ModelError, match=r"engine.learner = 'fsdp' does not fit a model with sight"):
        Learner(folder, ranks=Ranks(0, 2))


def processor_with(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def make(copy: Path) -> None:
        settings = json.loads((copy / "processor_config.json").read_text())
        change(settings)
        (copy / "processor_config.json").write_text(json.dumps(settings))

    return make


def keeps_proportions(settings: dict[str, Any]) -> None:
    settings["image_processor"] |= {"do_center_crop": False, "size": {"shortest_edge": 32}}


def finer_patches(settings: dict[str, Any]) -> None:
    settings["patch_size"] = 8


def larger_images(settings: dict[str, Any]) -> None:
    settings["image_processor"] |= {"size": {"height": 64, "width": 64}, "crop_size": {"height": 64, "width": 64}}


def unknown(settings: dict[str, Any]) -> None:
    settings["image_processor"]["image_processor_type"] = "NoSuchProcessor"


def any_size(copy: Path) -> None:
    """A tower that reads images of any size."""
    config = LlavaConfig.from_pretrained(copy)
    config.vision_config = PixtralVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=16
    )
    config.vision_feature_select_strategy = "full"
    LlavaForConditionalGeneration(config).save_pretrained(copy)


def no_processor(copy: Path) -> None:
    (copy / "processor_config.json").unlink()


UNFIT: list[tuple[Callable[[Path], None], str]] = [
    (
        processor_with(keeps_proportions),
        r"keeps the proportions of images \(a square becomes \(3, 32, 32\), a wide one \(3, 32, 64\)\)",
    ),
    (
        processor_with(finer_patches),
        r"its processor writes two images as \[16, 16\] tokens; expected \[4, 4\] placeholders",
    ),
    (processor_with(larger_images), r"its vision tower does not read what its processor makes of an image"),
    (processor_with(unknown), r"its processor of images does not load"),
    (any_size, r"writes two images as \[4, 4\] tokens; expected \[8\] placeholders"),
    (no_processor, "it has sight, but no processor of images"),
]


@pytest.mark.parametrize(("change", "said", "start"), [*((*one, open_decoder) for one in UNFIT), (*UNFIT[0], Learner)])
def test_a_model_whose_images_the_engine_cannot_compute_with_is_refused_at_start(
    change: Callable[[Path], None], said: str, start: Callable[[Path], Any], folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy)
    with pytest.raises(ModelError, match=said):
        start(copy)


def test_a_sequence_whose_pictures_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    learner = Learner(folder)
    for broken, said in (
        (row([3, 9, 9, 9, 9, 4], 5, [(3, RED)]), "an image where no placeholders are"),
        (row([3, 9, 9, 9, 9, 4], 4, [(1, RED)]), "an image where no placeholders are"),
        (row([3, 9, 9, 9, 9, 4], 5, [(1, b"")]), "without its bytes"),
        (row([3, 9, 9, 9, 9, 4], 5, [(1, b"no picture")]), "an image cannot be read"),
    ):
        with pytest.raises(EngineError, match=said):
            learner.logprobs([broken])
    tiny_model.build(tmp_path / "text", ["a"], hidden=16, layers=1)
    with pytest.raises(EngineError, match="has images, and the model has no sight"):
        Learner(tmp_path / "text").logprobs([row([3, 9, 9, 9, 9, 4], 5, [(1, RED)])])


def test_content_parts_that_cannot_be_placed_are_refused(folder: Path, processor: Any, tmp_path: Path) -> None:
    decoder, prompt = open_decoder(folder), ids(processor, PROMPT)
    for parts, said in (
        ([part(RED), part(BLUE)], "2 images for 1 placeholders"),
        ("picture", "expected a list"),
        ([{"type": "image_url", "url": "http://pictures"}], "expected .*data:"),
        ([{"type": "image_url", "url": "data:image/png;base64,§"}], "expected base64"),
        ([part(b"no picture")], "expected an image file"),
    ):
        with pytest.raises(InputError, match=said):
            placed_in(decoder, prompt, parts)
    tiny_model.build(tmp_path / "text", ["a"], hidden=16, layers=1)
    blind, body = (
        open_sampler(tmp_path / "text", EngineConfig(device="cpu")),
        {"token_ids": [1, 2], "content_parts": [part(RED)]},
    )
    with pytest.raises(InputError, match="the model has no sight"):
        blind.parse(json.dumps(body).encode())


async def test_other_requests_are_answered_while_an_image_is_decoded(folder: Path, processor: Any) -> None:
    sampler = open_sampler(folder, EngineConfig(device="cpu", max_num_seqs=4))
    assert sampler._decoder.images is not None
    prompt = ids(processor, PROMPT)
    given = {"sampling_params": {"max_tokens": 2}}
    async with TestClient(TestServer(create_app(sampler))) as client:
        route = "/inference/v1/generate"
        with sampler._decoder.images._processor._working:  # an image that takes as long as this
            slow = asyncio.create_task(
                client.post(route, json={**given, "token_ids": prompt, "content_parts": [part(RED)]})
            )
            async with client.post(route, json={**given, "token_ids": prompt[2:]}) as answer:
                assert answer.status == 200
            assert not slow.done()
        async with await slow as answer:
            assert answer.status == 200
            assert len((await answer.json())["prompt_token_ids"]) == len(prompt) - 1 + TOKENS
