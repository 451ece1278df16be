"""Run folders: a run's configuration, the hashes of what it was made of, its metrics and checkpoints.

``runs/<id>/``: config.json, files.json (hashes of the files that it names), fingerprint.json, metrics.jsonl, curve.png,
lock, logs/, trackers/ (what each has been sent), agent.pkl (where the agent travels by pickle), checkpoints/step-000010/ (a
transformers folder with the learner's state; of several policies a folder for each).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import orjson

from agentlightning.config.file import named_files
from agentlightning.config.run import DEFAULT_STORE, Config, config_text, parse_config, run_record
from agentlightning.engines.folders import LEARNER_STATE, copy_weights, damage, new_folder, restore_replaced
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError
from agentlightning.records import JSON, Run
from agentlightning.runtime.disk import file_hash, make_private_folder, open_private, sync
from agentlightning.store.open import existing_store
from agentlightning.store.scan import find_run
from agentlightning.trainer.interrupts import run_interruptible

RESUMED = "resumed"
"""Kind of the row in metrics.jsonl that says from which step's checkpoint the run went on."""


class RunFolder:
    """The folder of one run. Writing to it raises StoreError where the disk does not allow it."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.path = root / run_id
        self.run_id = run_id

    def make(self) -> None:
        """Make the folder where it is not there."""
        with _writing(self.path):
            if not self.path.parent.exists():
                make_private_folder(self.path.parent)
            make_private_folder(self.path)
            (self.path / "checkpoints").mkdir(exist_ok=True)
            (self.path / "logs").mkdir(exist_ok=True)

    def create(self, config: Config) -> None:
        """Make the folder and write the configuration, whole or not at all."""
        self.write_whole("config.json", config_text(config).encode() + b"\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other process trains this run meanwhile: ConflictError where one does. A lock ends with its process."""
        self.make()
        with _writing(self.path):
            file = open_private(self.path / "lock", "ab")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as cause:
                raise ConflictError(f"{self.run_id}: another process is training this run; end it first") from cause
            checkpoints = self.path / "checkpoints"
            for parent in (checkpoints, *checkpoints.glob("[!.]*")):
                restore_replaced(parent)
            for half in (*checkpoints.glob(".*"), *checkpoints.glob("*/.*")):  # what a learner wrote when it was killed
                shutil.rmtree(half, ignore_errors=True)
            yield

    @property
    def is_held(self) -> bool:
        """Returns whether a process works on this run now; its lock ends with it, however it ended."""
        try:
            with (self.path / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def write_tasks(self, name: str, rows: Iterable[JSON]) -> str:
        """Keep rows as a file, for a resumed run to read again; returns its absolute path."""
        self.write_whole(name, b"".join(orjson.dumps(row) + b"\n" for row in rows))
        return str((self.path / name).resolve())

    def write_whole(self, name: str, data: bytes) -> None:
        """Write a file of the folder, whole or not at all, also where the power is lost."""
        self.make()
        with _writing(self.path):
            temporary = (self.path / name).with_name(f".{Path(name).name}.tmp")
            with open_private(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path / name)
            for named in (self.path / name).parents[: 3 + name.count("/")]:  # up to the one that holds the runs' folder
                sync(named)

    def changed_files(self, files: Mapping[str, Path]) -> list[str]:
        """A sentence for each file that settings name and that was changed since the last call, which keeps their hashes.

        They may be changed, as a failed run is mended by mending its code; who goes on must know.
        """
        kept = self.path / "files.json"
        last: JSON = orjson.loads(kept.read_bytes()) if kept.exists() else {}
        now = {str(file): file_hash(file) for file in files.values()}
        if now != last:
            self.write_whole(kept.name, orjson.dumps(now))
        return [
            f"{setting}: {file} was changed after this run had started; from its last checkpoint on the run uses the file "
            "as it is now"
            for setting, file in files.items()
            if last.get(str(file), now[str(file)]) != now[str(file)]
        ]

    def keep_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Keep what the run was made of here, where nobody who may write to its store can change it."""
        self.write_whole("fingerprint.json", orjson.dumps(asdict(fingerprint)))

    def fingerprint(self) -> Fingerprint | None:
        """The fingerprint of the run when it was last started; None where it was not started in this folder."""
        file = self.path / "fingerprint.json"
        return Fingerprint(**orjson.loads(file.read_bytes())) if file.exists() else None

    @property
    def has_config(self) -> bool:
        """True once the run was started, or goes on, in this folder."""
        return (self.path / "config.json").exists()

    def has_checkpoint(self) -> bool:
        """True where there is a checkpoint to resume from."""
        return any(policies_in(checkpoint) for checkpoint in self.path.glob("checkpoints/*"))

    def config(self, store: str | None = None) -> Config:
        """The configuration that the run was started with; `store`: the URL where its store is now, if it was moved."""
        file = self.path / "config.json"
        try:
            table = orjson.loads(file.read_bytes())
        except FileNotFoundError as cause:
            raise NotFoundError(
                f"{self.run_id}: no such run in {self.path.parent}; see: agl runs list (of another host's run, name the "
                "store: --server URL)"
            ) from cause
        except orjson.JSONDecodeError as cause:
            raise ConfigError(f"{file}: not valid JSON: {cause}") from cause
        if store is not None:
            table["store"]["url"] = store
        return parse_config(table, str(file))

    def append_metrics(self, row: JSON) -> None:
        """Add a row with `step` and `kind`; of the kind `RESUMED`, it undoes those of later steps."""
        path = self.path / "metrics.jsonl"
        with _writing(self.path), open_private(path, "ab") as file:
            # What a full disk left of a row must not take this one with it.
            file.write((b"" if _ends_a_line(path) else b"\n") + orjson.dumps(row) + b"\n")

    def metrics(self) -> list[JSON]:
        """Rows of metrics.jsonl, the last one of each step; what a crash undid and nobody executed again is left out."""
        rows: dict[tuple[int, str], JSON] = {}
        file = self.path / "metrics.jsonl"
        for line in file.read_bytes().splitlines() if file.exists() else ():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # a full disk or a power cut leaves half a line; the store has its numbers
            if row["kind"] == RESUMED:
                rows = {key: kept for key, kept in rows.items() if kept["step"] <= row["step"]}
            else:
                rows[row["step"], row["kind"]] = row
        return sorted(rows.values(), key=lambda row: (row["step"], row["kind"]))


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as opened:
        if not opened.seek(0, os.SEEK_END):
            return True
        opened.seek(-1, os.SEEK_END)
        return opened.read(1) == b"\n"


def make_default_folder(store_url: str) -> None:
    """The folder of the default store is ours to make; any other one that is missing is a slip of the user's."""
    if store_url == DEFAULT_STORE:
        folder = Path(DEFAULT_STORE.removeprefix("sqlite:///")).parent
        with _writing(folder):
            make_private_folder(folder)


def checkpoint_damage(checkpoint: Path) -> str | None:
    """Returns what is wrong with a checkpoint; None where nothing is, empty where it is not there (any more)."""
    policies = policies_in(checkpoint)
    for folder in policies.values():
        if found := damage(folder):
            return found
        if not (folder / LEARNER_STATE).stat().st_size:
            return f"{LEARNER_STATE} is empty"
    return None if policies else ""


def policies_in(checkpoint: Path) -> dict[str, Path]:
    """The policies that a checkpoint's folder holds, and where; '' where there is one, which lies in the folder itself."""
    if (checkpoint / LEARNER_STATE).exists():
        return {"": checkpoint}
    return {state.parent.name: state.parent for state in sorted(checkpoint.glob(f"[!.]*/{LEARNER_STATE}"))}


def checkpoint_folders(checkpoint: Path, policies: Sequence[str]) -> dict[str, Path]:
    """Folder of each policy: the only one is in the folder itself, several are in one of their name each."""
    if len(policies) == 1:
        return {policies[0]: checkpoint}
    return {policy: checkpoint / policy for policy in policies}


def export_policy(checkpoint: Path, to: Path, policy: str | None = None) -> Path:
    """Copy a policy of a checkpoint as a plain transformers folder, without the learner's state; returns `to`.

    policy: by name, where the checkpoint holds several. ConfigError where `to` is not empty.
    """
    found, one = policies_in(checkpoint), policy or ""
    if one not in found:  # the only policy of a run has no name there
        given = f"{one!r} is none of the run's policies" if one else "the run has several policies"
        raise ConfigError(f"policy: {given}; expected {', '.join(filter(None, found)) or 'none'}")
    with new_folder(to) as made:
        copy_weights(found[one], made)
    return to


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise StoreError(
            f"{folder}: cannot be written: {cause.strerror or cause}; choose another --runs folder"
        ) from cause


def run_config(folder: RunFolder, store: str | None = None) -> Config:
    """The configuration in the run's folder, else that of the store's record; `store`: its URL, where it was moved or the
    folder is on another host (AGL_STORE does for that). NotFoundError where there is neither."""
    known = store or os.environ.get("AGL_STORE")
    if folder.has_config or known is None:
        return folder.config(store)
    return run_interruptible(partial(_recorded, folder.run_id, known))


async def _recorded(run_id: str, store: str) -> Config:
    async with existing_store(store) as opened:
        return recorded_config(await find_run(opened, run_id), store)


def recorded_config(run: Run, store: str | None = None) -> Config:
    """The configuration that a store keeps with the run; `store`: the URL in its place, since the record has no password."""
    table = {**run.config, "store": {} if store is None else {"url": store}}
    return parse_config(table, f"run {run.id}")


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
        return cls(**summary.get(FINGERPRINT, {}))


def take_fingerprint(config: Config, tasks: Sequence[JSON]) -> Fingerprint:
    """Takes the fingerprint of a run with these training tasks; of offline training, its runs are the data. Imports nothing.

    The code is every file that settings name, but for tasks that are no code; of a command, the files among its words.
    Modules that they import are not part of it.
    """
    table = {name: value for name, value in run_record(config).items() if name != "store"}
    files = named_files(config).items()
    code = {name: file_hash(path) for name, path in files if path.suffix == ".py" or not name.startswith("data.")}
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
