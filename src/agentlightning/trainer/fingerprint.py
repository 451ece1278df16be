"""Fingerprint: hashes of a run's settings, of its agent's code and of its tasks, by which others know what it was made of.

Made when a run starts or goes on; kept in the run's summary and with every model version. Pure but for reading the files
that settings name.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from agentlightning.config.file import named_files
from agentlightning.config.run import Config, run_record
from agentlightning.records import JSON
from agentlightning.runtime.disk import file_hash

FINGERPRINT = "fingerprint"
"""Its name in a run's summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """SHA-256 hashes (hex); empty where nobody took them."""

    config: str = ""
    code: str = ""
    data: str = ""

    def summary(self) -> JSON:
        """As a run's summary keeps it."""
        return {FINGERPRINT: asdict(self)}

    @classmethod
    def of_summary(cls, summary: JSON) -> Fingerprint:
        """Of a run's summary; empty where its run was made by an earlier version."""
        kept = summary.get(FINGERPRINT)
        return cls(**kept) if isinstance(kept, dict) else cls()


def take_fingerprint(config: Config, tasks: Sequence[JSON]) -> Fingerprint:
    """Takes the fingerprint of a run with these training tasks; of offline training, its runs are the data.

    The code is every file that settings name, but for the tasks': of agent, rewards and algorithm; of a command,
    the files among its words. Modules that they import are not part of it.
    """
    table = {name: value for name, value in run_record(config).items() if name != "store"}
    code = {name: file_hash(path) for name, path in named_files(config).items() if not name.startswith("data.")}
    code |= {f"agent.command {path.name}": file_hash(path) for path in _files_of(config.agent.command)}
    code |= {"agent.run": config.agent.run or ""} if "agent.run" not in code else {}
    rows: Iterable[object] = tasks if config.data.train is not None else config.data.from_run
    return Fingerprint(config=_hash([table]), code=_hash([code]), data=_hash(rows))


def _files_of(command: str | None) -> list[Path]:
    try:
        words = shlex.split(command or "")
    except ValueError:  # a quote that does not end, which whoever runs it says
        return []
    return [path for path in map(Path, words) if path.is_file()]


def _hash(values: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS) + b"\n")
    return digest.hexdigest()
