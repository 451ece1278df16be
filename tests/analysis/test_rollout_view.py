"""A rollout as text."""

from __future__ import annotations

import pytest

from agentlightning.analysis.rollout_view import content_text

PICTURE = {"type": "image", "image": "caa496709d1f4e7b"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[b]red[/b]", "[b]red[/b]"),
        (None, ""),
        ([{"type": "text", "text": "and"}, PICTURE, {"type": "text", "text": "?"}], "and [image caa49670] ?"),
        ([PICTURE, {"type": "image", "source": "x"}, 3], '[image caa49670] {"type":"image","source":"x"} 3'),
    ],
)
def test_content_is_shown_as_text_and_images_by_their_hash(content: object, text: str) -> None:
    assert content_text(content) == text
