"""fetch: a file of new weights from the trainer, by HTTP, as it was announced or not."""

from __future__ import annotations

import hashlib
import shutil
import urllib.request
from pathlib import Path

SILENCE_S = 60.0


def fetch(url: str, target: Path, expected: str, key: str) -> None:
    """Raises ValueError if the content has another SHA-256 than `expected`; key: of the trainer's server."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=SILENCE_S) as response, target.open("wb") as file:
        shutil.copyfileobj(response, file, 1 << 20)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{url} is not what was announced: its hash is {found}")
