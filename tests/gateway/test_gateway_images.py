"""Images in calls of a policy with sight: every protocol, exact prompts, the record, and what is refused."""

from __future__ import annotations

import base64
import re
import shutil
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from gateway_house import House, path
from picture_requests import (
    BLUE,
    PART,
    RED,
    TOKENS,
    animation,
    bomb,
    chat_image,
    png,
    post,
    refused,
    uri,
    user,
)

from agentlightning.records import ImageSpan
from agentlightning.store.gateway_events import FAILED_CALLS


async def test_a_picture_is_recorded_by_hash_and_reaches_the_engine_beside_the_ids(sighted: House) -> None:
    claim = await sighted.claim()
    await post(sighted, claim, "chat/completions", {"messages": [user("what is", chat_image(RED), "?")]})
    [call] = await sighted.store.calls([claim.rollout.id])
    name = sha256(RED).hexdigest()
    start = call.images[0].start
    assert call.images == [ImageSpan(hash=name, start=start, end=start + TOKENS)]
    assert call.messages == [user("what is", {"type": "image", "image": name}, "?")]
    assert await sighted.store.files(sighted.run_id, [name]) == {name: RED}
    [request] = sighted.engine.requests
    [part] = request["content_parts"]
    assert (part["uuid"], base64.b64decode(part["url"].partition(",")[2])) == (name, RED)
    assert len(request["token_ids"]) == len(call.suffix_ids) - TOKENS + 1
    assert call.prompt_tokens == len(call.suffix_ids)


async def test_later_turns_continue_a_prompt_with_pictures_exactly_also_after_a_restart(sighted: House) -> None:
    claim = await sighted.claim()
    answer = {"role": "assistant", "content": "red"}
    messages = [user(chat_image(RED), "what is it ?")]
    await post(sighted, claim, "chat/completions", {"messages": messages})
    messages += [answer, user(chat_image(BLUE), "and that ?")]
    await post(sighted, claim, "chat/completions", {"messages": messages})
    sighted.app = sighted.gateway()
    messages += [answer, user("and ?")]
    await post(sighted, claim, "chat/completions", {"messages": messages})
    messages[0] = user(chat_image(BLUE), "what is it ?")  # another conversation
    await post(sighted, claim, "chat/completions", {"messages": messages})
    one, two, three, other = await sighted.store.calls([claim.rollout.id])
    assert [(call.parent_id, call.fork_cause) for call in (two, three)] == [(one.id, None), (two.id, None)]
    assert ([image.hash for image in two.images], three.images) == ([sha256(BLUE).hexdigest()], [])
    assert two.prompt_tokens == len(one.suffix_ids) + len(one.sampled_ids) + len(two.suffix_ids)
    names = [sha256(data).hexdigest() for data in (RED, BLUE)]
    assert [part["uuid"] for part in sighted.engine.requests[1]["content_parts"]] == names
    assert [part["uuid"] for part in sighted.engine.requests[2]["content_parts"]] == names
    assert (other.parent_id, other.fork_cause is None) == (None, False)


@pytest.mark.parametrize("given", [{}, {"structured": "context_only"}, {"structured": "refuse"}, {"logprobs": "raw"}])
async def test_a_policy_that_reads_pictures_says_no_placeholder_of_its_own(sighted: House, given: Any) -> None:
    await sighted.serve_policy(**given)
    claim = await sighted.claim()
    await post(sighted, claim, "chat/completions", {"messages": [user("what is it ?")]})
    [call] = await sighted.store.calls([claim.rollout.id])
    [request] = sighted.engine.requests
    assert sighted.renderer.images is not None
    assert call.decoding == {"logits": {"logit_bias": {str(sighted.renderer.images.placeholder_id): -100.0}}}
    assert request["sampling_params"]["logit_bias"] == call.decoding["logits"]["logit_bias"]


async def test_the_biases_of_a_request_keep_their_place_beside_the_placeholders(sighted: House) -> None:
    assert sighted.renderer.images is not None
    placeholder = str(sighted.renderer.images.placeholder_id)
    claim = await sighted.claim()
    await post(sighted, claim, "chat/completions", {"messages": [user("?")], "logit_bias": {"5": 1, placeholder: 100}})
    [call] = await sighted.store.calls([claim.rollout.id])
    assert call.decoding["logits"] == {"logit_bias": {"5": 1, placeholder: -100.0}}


ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": uri(RED).partition(",")[2]},
}
INLINE = {"inlineData": {"mimeType": "image/png", "data": uri(RED).partition(",")[2]}}
WAYS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [user(chat_image(RED))]},
    "responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri(RED)}]}]},
    "messages": {"max_tokens": 9, "messages": [user(ANTHROPIC, "what is it ?")]},
    "models/policy:generateContent": {"contents": [{"role": "user", "parts": [{"text": "what is it ?"}, INLINE]}]},
}


@pytest.mark.parametrize(("route", "body"), WAYS.items())
async def test_every_protocol_has_pictures(sighted: House, route: str, body: dict[str, Any]) -> None:
    claim = await sighted.claim()
    for stream in (False, True):
        where = route.replace(":generate", ":streamGenerate") + "?alt=sse" if stream and ":" in route else route
        answer = await sighted.http().post(
            f"{path(claim)}/v1/{where}", json={"model": "policy", "stream": stream, **body}
        )
        assert answer.status_code == 200, answer.text
    calls = await sighted.store.calls([claim.rollout.id])
    assert [[image.hash for image in call.images] for call in calls] == [[sha256(RED).hexdigest()]] * 2


async def test_a_response_that_is_continued_by_id_has_the_pictures_of_before(sighted: House) -> None:
    claim = await sighted.claim()
    first = await post(sighted, claim, "responses", WAYS["responses"])
    await post(sighted, claim, "responses", {"input": "and that ?", "previous_response_id": first["id"]})
    one, two = await sighted.store.calls([claim.rollout.id])
    assert two.parent_id == one.id
    assert sighted.engine.requests[1]["content_parts"] == sighted.engine.requests[0]["content_parts"]


REFUSALS: dict[bytes, str] = {
    b"hello": "expected an image file (PNG, JPEG, WEBP, GIF)",
    RED[:40]: "expected an image file",
    bomb(): "expected an image of at most 50000000 pixels",
    png("red", (100_000, 1)): "at most 100 times as long as wide",
    animation(): "expected a still image, got an animated GIF",
}


async def test_a_request_of_too_many_pixels_is_refused_before_one_is_decoded(sighted: House) -> None:
    claim = await sighted.claim()
    pictures = [chat_image(bomb(7000, 7000 - number)) for number in range(5)]
    with pytest.raises(openai.BadRequestError, match="at most 200000000 pixels in all"):
        await sighted.openai(claim).chat.completions.create(model="policy", messages=[user(*pictures)])


async def test_a_conversation_that_is_continued_by_id_has_a_bounded_number_of_pictures(sighted: House) -> None:
    claim = await sighted.claim()
    shown = {"type": "input_image", "image_url": uri(RED)}
    asked: dict[str, Any] = {"input": [{"role": "user", "content": [shown] * 33}]}
    first = await post(sighted, claim, "responses", asked)
    found = await post(sighted, claim, "responses", {**asked, "previous_response_id": first["id"]}, status=400)
    assert found["error"]["message"].startswith("input: expected at most 64 images in all")


async def test_what_is_no_picture_is_refused_by_field_and_nothing_is_fetched(sighted: House) -> None:
    claim = await sighted.claim()
    url = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
    rows = [(chat_image(data), said) for data, said in REFUSALS.items()]
    for part, said in ((url, "the gateway fetches no URLs"), *rows):
        error = await refused(sighted, claim, part)
        assert (error["param"], said in error["message"]) == (f"{PART}.image_url.url", True), error
    assert not sighted.engine.requests


async def test_pictures_that_cannot_be_read_are_refused_when_the_call_arrives(sighted: House) -> None:
    claim = await sighted.claim()
    for given, parts, said in (
        ({}, [chat_image(RED)] * 65, "at most 64 images in one request, got 65"),
        ({}, ["what is <image> ?"], "the text holds the model's placeholder of an image"),
        (
            {"images": False},
            [chat_image(RED)],
            ": the engine of this run reads no images; send text only",
        ),
    ):
        await sighted.serve_policy(**given)
        sighted.app = sighted.gateway()
        assert said in (await refused(sighted, claim, *parts))["message"]
    assert not sighted.engine.requests


async def test_a_model_without_sight_refuses_pictures_in_one_sentence(house: House) -> None:
    error = await refused(house, await house.claim(), chat_image(RED))
    assert error["message"] == f"{PART}.image_url.url: the model has no sight; send text only"
    assert error["param"] == f"{PART}.image_url.url"


async def test_an_engine_that_expands_pictures_in_another_way_fails_the_call(sighted: House) -> None:
    sighted.engine.expand = lambda ids: ids
    claim = await sighted.claim()
    found = await post(sighted, claim, "chat/completions", {"messages": [user(chat_image(RED))]}, status=502)
    assert "expands images in another way than the model's processor" in found["error"]["message"]
    assert [call.finish_reason for call in await sighted.store.calls([claim.rollout.id])] == ["abandoned"]


async def test_a_processor_that_does_not_load_is_no_mistake_of_the_agent(
    sighted: House, sight_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sight_folder, tmp_path / "model")
    (folder / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    await sighted.serve_policy(tokenizer=str(folder))
    claim = await sighted.claim()
    found = await post(sighted, claim, "chat/completions", {"messages": [user(chat_image(RED))]}, status=500)
    assert f"model {folder}: its processor of images does not load" in found["error"]["message"]
    assert (found["error"]["type"], found["error"]["code"]) == ("server_error", "internal")
    (told,) = await sighted.store.spans([claim.rollout.id])
    assert told.name == FAILED_CALLS


async def test_the_documented_agent_that_sends_an_image_runs(sighted: House) -> None:
    page = (Path(__file__).parents[2] / "docs" / "apis.md").read_text(encoding="utf-8").partition("\n## Images")[2]
    (agent,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    claim = await sighted.claim()
    llm = SimpleNamespace(
        base_url=f"http://gateway{path(claim)}/v1", api_key=claim.key, model="policy", http_client=sighted.http()
    )
    shown: dict[str, Any] = {}
    exec(agent, shown)
    assert await shown["solve"]({"png": RED.hex(), "colour": "red"}, llm) == 1.0
    calls = await sighted.store.calls([claim.rollout.id])
    assert [image.hash for call in calls for image in call.images] == [sha256(RED).hexdigest()]
