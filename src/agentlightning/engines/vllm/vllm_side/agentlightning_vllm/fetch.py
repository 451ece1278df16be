"""fetch: a file of new weights, from the trainer by HTTP or from an object store by fsspec, as it was announced or not.

An object store's package (s3fs, adlfs) has to be in vLLM's environment; fsspec is there already.
"""

from __future__ import annotations

import hashlib
import shutil
import urllib.request
from pathlib import Path

SILENCE_S = 60.0


def fetch(url: str, target: Path, expected: str, key: str = "") -> None:
    """Raises ValueError where the content has another SHA-256 than `expected`; key: of the trainer's server."""
    if url.startswith("http://"):
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=SILENCE_S) as response, target.open("wb") as file:
            shutil.copyfileobj(response, file, 1 << 20)
    else:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url)
        files.get_file(path, str(target))
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{url} is not what was announced: its hash is {found}")
