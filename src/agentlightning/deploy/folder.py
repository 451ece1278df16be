"""write_files: puts files into a folder, and nothing over what is there and differs.

Driven by `agl deploy`. Knows nothing of what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentlightning.errors import ConfigError


def write_files(folder: Path, files: Mapping[str, str], *, force: bool = False) -> list[str]:
    """Write the files and return the paths of those that are new or changed; scripts can be executed.

    Whoever gets the files owns them: where one is there with other contents, ConfigError names it and nothing is written,
    unless `force`.
    """
    changed = [path for path, text in files.items() if _text_of(folder / path) != text]
    theirs = [path for path in changed if (folder / path).exists()]
    if theirs and not force:
        raise ConfigError(
            f"--to: {folder / theirs[0]} is there and is not what would be written"
            f"{f', as are {len(theirs) - 1} more' if theirs[1:] else ''}; keep it elsewhere, or write over it with --force"
        )
    for path in changed:
        file = folder / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{file.name}.tmp")  # a file is whole, or not there
            temporary.write_text(files[path], encoding="utf-8", newline="\n")
            temporary.chmod(0o755 if path.endswith(".sh") else 0o644)
            temporary.replace(file)
        except OSError as cause:
            raise ConfigError(f"--to: {file} cannot be written: {cause.strerror}") from cause
    return changed


def _text_of(file: Path) -> str | None:
    try:
        return file.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return None
