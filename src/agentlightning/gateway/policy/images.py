"""Images of a call to the policy: read with the model's own processor, kept in the store, sent to the engine.

Driven by calls.py. A request brings the images of its whole history, or, where it continues a stored response, only the new
ones: the others are read from the store by hash, and so are those that the agent has uploaded. They reach an engine in the
form of vLLM's /inference/v1/generate: one placeholder for each among the ids, and the files beside them; an engine expands
the placeholders as the processor does, and is asked what came of it. Knows no protocol and no template.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from agentlightning.errors import EngineError, InputError
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.gateway.policy.engine_router import Policy
from agentlightning.gateway.uploaded_files import UploadedFiles
from agentlightning.protocols.base import ApiError, CompletionRequest
from agentlightning.protocols.images import FILE_ID
from agentlightning.rendering.conversation import PromptPlan
from agentlightning.rendering.graph import image_hashes, normal
from agentlightning.rendering.images import MAX_REQUEST_PIXELS, ImageProcessor, pixel_count
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore
from agentlightning.types import JSON

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallImages:
    """The images of one call by hash."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    expansions: Mapping[str, list[int]] = field(default_factory=dict)
    """The ids that stand for each in a prompt."""


async def read_images(
    request: CompletionRequest,
    policy: Policy,
    store: LightningStore,
    uploaded: UploadedFiles,
    attempt: TrackedAttempt,
) -> CallImages:
    """The images of a request. ApiError names the field of one that is none, or says that nothing here has sight."""
    if not request.images and not any(isinstance(message.get("content"), list) for message in request.messages):
        return CallImages()
    files = {image.hash: image.data for image in request.images if image.data is not None}
    wanted = set(image_hashes([normal(message) for message in request.messages]))
    if not wanted:
        return CallImages()
    paths = {image.hash: image.path for image in request.images}
    processor = policy.renderer.images
    if processor is None or not policy.images:
        path = next(iter(paths.values()), "messages")
        why = "the model has no sight" if processor is None else "the engine of this run reads no images"
        raise ApiError(f"{path}: {why}; send text only", param=path, code="unsupported_value")
    for image in request.images:
        if image.data is None:
            await uploaded.find(attempt, FILE_ID + image.hash, image.path)
    files |= await store.images(attempt.rollout.run_id, sorted(wanted - files.keys()))
    if gone := wanted - files.keys():
        raise ApiError(f"messages: the image {min(gone)} of an earlier response is not kept any more", param="messages")
    return CallImages(files, await asyncio.to_thread(_expansions, processor, files, paths))


def _expansions(
    processor: ImageProcessor, files: Mapping[str, bytes], paths: Mapping[str, str]
) -> dict[str, list[int]]:
    def read(name: str, work: Callable[[bytes], T]) -> T:
        try:
            return work(files[name])
        except InputError as cause:
            path = paths.get(name, "messages")
            raise ApiError(f"{path}: {cause}", param=path) from cause

    if (pixels := sum(read(name, pixel_count) for name in files)) > MAX_REQUEST_PIXELS:
        said = f"expected images of at most {MAX_REQUEST_PIXELS} pixels in all, got {pixels}"
        raise ApiError(f"messages: {said}", param="messages")
    return {name: read(name, processor.expansion) for name in files}


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
