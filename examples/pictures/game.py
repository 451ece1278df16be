"""The picture game: an agent of plain OpenAI-SDK code asks for a picture and says the colour of the shape in it.

It knows nothing of training: only its base URL is given. Pictures are drawn anew for every task (shape, size, place, shade
and background), so that none can be learned by heart. Held-out tasks are of seeds that training never draws.
"""

from __future__ import annotations

import base64
import io
from random import Random
from typing import Any

from openai import AsyncOpenAI
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 190, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 210, 50),
    "purple": (160, 50, 190),
    "white": (235, 235, 235),
}
SIDE = 32
GREETING = "Say look and see a picture ."
QUESTION = "What colour is the shape ?"
TRAINING_TASKS, HELD_OUT_TASKS = 4096, 200


def train(seed: int = 0) -> list[dict[str, Any]]:
    """Training tasks."""
    return [{"picture": f"train {seed} {number}"} for number in range(TRAINING_TASKS)]


def held_out() -> list[dict[str, Any]]:
    """Held-out tasks, the same ones for every seed."""
    return [{"picture": f"held out {number}"} for number in range(HELD_OUT_TASKS)]


async def solve(task: dict[str, Any], llm: Any) -> float:
    """The agent: two calls, the second of which has the picture."""
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    colour, picture = draw(task["picture"])
    messages: list[Any] = [{"role": "user", "content": GREETING}]
    reply = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
    said = reply.choices[0].message.content or ""
    if said != "look":
        return 0.0
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture).decode()}}
    question = {"type": "text", "text": QUESTION}
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [image, question]}]
    reply = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
    return float(reply.choices[0].message.content == colour)


def draw(name: str) -> tuple[str, bytes]:
    """The colour of the shape in the picture of this name, and the picture as a PNG."""
    rng = Random(name)
    colour = rng.choice(sorted(COLOURS))
    shade = tuple(max(0, min(255, part + rng.randint(-20, 20))) for part in COLOURS[colour])
    ground = rng.randint(0, 90)
    image = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    size = rng.randint(14, 24)
    left, top = rng.randint(0, SIDE - size), rng.randint(0, SIDE - size)
    shape = pen.ellipse if rng.random() < 0.5 else pen.rectangle
    shape((left, top, left + size, top + size), fill=shade)
    file = io.BytesIO()
    image.save(file, "PNG")
    return colour, file.getvalue()
