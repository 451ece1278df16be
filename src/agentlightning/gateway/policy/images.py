"""Images of a call to the policy: read with the model's own processor, kept in the store, sent to the engine.

Driven by calls.py. A request brings the images of its whole history, or, where it continues a stored response, only the new
ones: the others are read from the store by hash. They reach an engine in the
form of vLLM's /inference/v1/generate: one placeholder for each among the ids, and the files beside them; an engine expands
the placeholders as the processor does, and is asked what came of it. Knows no protocol and no template.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from agentlightning.errors import EngineError, InputError, ModelError
from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.gateway.policy.engine_router import Policy
from agentlightning.protocols.base import ApiError, CompletionRequest
from agentlightning.protocols.images import MAX_IMAGES
from agentlightning.records import JSON
from agentlightning.rendering.conversation import PromptPlan
from agentlightning.rendering.graph import image_hashes, normal
from agentlightning.rendering.images import MAX_REQUEST_PIXELS, pixel_count
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore

if TYPE_CHECKING:
    from agentlightning.gateway.policy.response_decoder import AgentCall

MAX_REQUEST_IMAGE_BYTES = 40 << 20
"""Of all images of a request, each as often as it is shown: the sampler takes bodies of 64 MiB, in base64."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallImages:
    """The images of one call by hash."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    expansions: Mapping[str, list[int]] = field(default_factory=dict)
    """The ids that stand for each in a prompt."""


def read_placeholder(policy: Policy) -> int | None:
    """The token that stands for an image in the prompts of a policy; None where it reads no images."""
    processor = policy.renderer.images
    return processor.placeholder_id if processor is not None and policy.images else None


async def read_images(
    request: CompletionRequest,
    policy: Policy,
    store: LightningStore,
    decoding: asyncio.Lock,
    call: AgentCall,
) -> CallImages:
    """The images of a request. ApiError names the field of one that is none, or says that nothing here has sight.

    Images are decoded one at a time under `decoding`. What is read from the store counts as bytes of the request, whose
    body only names it.
    """
    attempt = call.attempt
    files = {image.hash: image.data for image in request.images}
    wanted = Counter(image_hashes([normal(message) for message in request.messages]))
    if not wanted:
        return CallImages()
    paths = {image.hash: image.path for image in request.images}
    processor = policy.renderer.images
    if processor is None or not policy.images:
        path = next(iter(paths.values()), "messages")
        why = "the model has no sight" if processor is None else "the engine of this run reads no images"
        raise ApiError(f"{path}: {why}; send text only", param=path, code="unsupported_value")
    if wanted.total() > MAX_IMAGES:
        raise _too_much(f"at most {MAX_IMAGES} images")

    async def read(name: str, work: Callable[[bytes], T]) -> T:
        try:
            async with attempt.turn, decoding:
                return await asyncio.to_thread(work, files[name])
        except ModelError:  # its processor does not load, which is no fault of the image
            raise
        except InputError as cause:
            path = paths.get(name, "messages")
            raise ApiError(f"{path}: {cause}", param=path) from cause

    size = pixels = 0
    for name, times in wanted.items():
        if name not in files:
            files[name] = await _stored(store, call, name)
        if (size := size + times * len(files[name])) > MAX_REQUEST_IMAGE_BYTES:
            raise _too_much(f"images of at most {MAX_REQUEST_IMAGE_BYTES >> 20} MiB")
        if (pixels := pixels + await read(name, pixel_count)) > MAX_REQUEST_PIXELS:
            raise _too_much(f"images of at most {MAX_REQUEST_PIXELS} pixels")
    return CallImages(files, {name: await read(name, processor.expansion) for name in wanted})


async def _stored(store: LightningStore, call: AgentCall, name: str) -> bytes:
    async with call.attempt.turn:
        found = await store.files(call.attempt.rollout.run_id, [name])
        if name not in found:
            raise ApiError(f"messages: the image {name} of an earlier response is not kept any more", param="messages")
        call.admission.take(len(found[name]))
        return found[name]


def _too_much(most: str) -> ApiError:
    return ApiError(f"messages: expected {most} in all, those of earlier responses among them", param="messages")


def engine_prompt(plan: PromptPlan, images: CallImages, renderer: Renderer) -> JSON:
    """The fields of an engine's request that hold the prompt."""
    places = plan.prompt_images
    if not places:
        return {"token_ids": plan.prompt_ids}
    assert renderer.images is not None
    placeholder = renderer.images.placeholder_id
    ids: list[int] = []
    before = 0
    for place in places:
        ids += [*plan.prompt_ids[before : place.start], placeholder]
        before = place.end
    ids += plan.prompt_ids[before:]
    if ids.count(placeholder) != len(places):
        raise ApiError("messages: a completion holds the model's placeholder of an image", param="messages")
    parts = [
        {
            "type": "image_url",
            "url": "data:application/octet-stream;base64," + base64.b64encode(images.files[place.hash]).decode(),
            "uuid": place.hash,
        }
        for place in places
    ]
    return {"token_ids": ids, "content_parts": parts, "return_token_ids": True}


def check_prompt(plan: PromptPlan, sampled: SampledTokens) -> None:
    """EngineError where an engine expanded images to another prompt than the one that is recorded."""
    if sampled.prompt_ids is not None and sampled.prompt_ids != plan.prompt_ids:
        raise EngineError(
            f"the engine read a prompt of {len(sampled.prompt_ids)} tokens where {len(plan.prompt_ids)} are recorded: it "
            "expands images in another way than the model's processor"
        )
