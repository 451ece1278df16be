"""Registration: a recorded checkpoint becomes a model version of each policy, with what made it.

The training loop drives it after every checkpoint, and again when a run goes on: a version is registered once, however
often a trainer is killed, and never before its weights are whole. Knows what saved folders hold, nothing of engines.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from agentlightning.config.run import Config
from agentlightning.engines.saved_folders import LEARNER_FOLDER, LEARNER_STATE, MANIFEST
from agentlightning.records import JSON, Checkpoint
from agentlightning.runtime.disk import file_hash
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion
from agentlightning.trainer.checkpoint import RunFolder, checkpoint_folders
from agentlightning.trainer.checkpoint_files import HASH, local_folder
from agentlightning.trainer.evaluate import TEMPERATURES
from agentlightning.trainer.fingerprint import Fingerprint

ADAPTER = "adapter"
"""Folder of the low-rank adapter inside a saved policy, where one was trained."""
MAX_README_CHARS = 20_000
Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registrar:
    """Registers the checkpoints of one run."""

    store: LightningStore
    config: Config
    folder: RunFolder
    policies: Sequence[str]
    made_of: Fingerprint

    async def register(self, step: int) -> list[ModelVersion]:
        """Registers the recorded checkpoint of `step`, which is whole in the run's folder here.

        None of step 0, whose weights are those that training starts from.
        """
        recorded = [one for one in await self.store.checkpoints(self.folder.run_id) if one.step == step]
        if not step or not recorded:
            return []
        own = await self.store.models(run_id=self.folder.run_id)
        metrics = await self._held_out(step)
        folders = checkpoint_folders(local_folder(recorded[0], self.folder), self.policies)
        return [
            await self.store.register_model(await self._version(alias, path, recorded[0], own, metrics))
            for alias, path in folders.items()
        ]

    async def _version(
        self, alias: str, path: Path, checkpoint: Checkpoint, own: Sequence[ModelVersion], metrics: JSON
    ) -> ModelVersion:
        config, run_id = self.config, self.folder.run_id
        name = config.model.name or run_id
        several = len(self.policies) > 1
        policy = config.policies.get(alias)
        path_given = policy.model if policy is not None and policy.model is not None else config.model.path
        source = await self._source(path_given)
        before = [one for one in own if one.policy == alias and one.step < checkpoint.step]
        published = await self.store.resources(run_id, alias, latest=False, version=checkpoint.version)
        return ModelVersion(
            name=f"{name}-{alias}" if several else name,
            number=0,
            run_id=run_id,
            policy=alias,
            step=checkpoint.step,
            resource_version=checkpoint.version,
            parent=before[-1].reference if before else (path_given if source is None else source.reference),
            base_model=path_given if source is None else source.base_model,
            weights=await asyncio.to_thread(weights_of, checkpoint, path, alias if several else ""),
            prompts=dict(published[0].value.get("prompts") or {}) if published else {},
            config_hash=self.made_of.config,
            code_hash=self.made_of.code,
            data_hash=self.made_of.data,
            metrics=metrics,
            licence=await asyncio.to_thread(licence_of, path_given) if source is None else source.licence,
        )

    async def _source(self, path: str) -> ModelVersion | None:
        """The version whose weights the run started from; None where they are of no version that this run may read."""
        manifest = Path(path) / MANIFEST
        if not manifest.is_file():
            return None
        known = await asyncio.to_thread(file_hash, manifest)
        found = [one for one in await self.store.models() if one.weights.get("manifest_hash") == known]
        return found[0] if found else None

    async def _held_out(self, step: int) -> JSON:
        """The run's newest evaluation of each kind up to this step: mean reward, and the normal interval of 95 %."""
        found: JSON = {}
        for kind in TEMPERATURES:
            numbers: dict[str, dict[int, float]] = {}
            for what in ("reward_mean", "reward_stderr", "tasks"):
                rows = await self.store.metrics(self.folder.run_id, f"eval/{kind}/{what}")
                numbers[what] = {row.step: row.value for row in rows if not row.abandoned and row.step <= step}
            whole = set.intersection(*(set(each) for each in numbers.values()))
            if whole:
                at = max(whole)
                mean, error, tasks = (each[at] for each in numbers.values())
                interval = {"low": mean - Z * error, "high": mean + Z * error}
                found[f"eval/{kind}/reward"] = {"mean": mean, **interval, "n": int(tasks), "step": at}
        return found


def weights_of(checkpoint: Checkpoint, folder: Path, alias: str = "") -> JSON:
    """The weights of a saved policy, as a version has them: where they are, what they are known by, and how large they are.

    folder: of the policy, here. alias: its name where the checkpoint has several. Raises OSError.
    """
    url, at_url, _ = checkpoint.path.partition(HASH)
    place = f"{url}/{alias}".rstrip("/") if at_url else f"file://{folder}"
    manifest = folder / MANIFEST
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and not _is_learners(path, folder)]
    return {
        "kind": "adapter" if (folder / ADAPTER).is_dir() else "full",
        "url": place,
        "manifest_hash": file_hash(manifest) if manifest.is_file() else "",
        "bytes": sum(sizes),
    }


def _is_learners(path: Path, folder: Path) -> bool:
    return path.relative_to(folder).parts[0] in (LEARNER_STATE, LEARNER_FOLDER, MANIFEST)


def licence_of(model: str) -> str | None:
    """The licence that a model's README or configuration names; None where there is neither here. Asks no hub.

    A model card begins with YAML between two lines of ``---``; its ``license:`` is an identifier, and ``other`` is named
    by ``license_name:``.
    """
    for name in ("README.md", "config.json"):
        file = _file_of(model, name)
        try:
            text = file.read_text(encoding="utf-8", errors="replace") if file is not None else ""
        except OSError:
            continue
        licence = _of_config(text) if name == "config.json" else _of_card(text[:MAX_README_CHARS])
        if licence:
            return licence
    return None


def _file_of(model: str, name: str) -> Path | None:
    local = Path(model).expanduser()
    if local.is_dir():
        return local / name
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, name)
    except ValueError:  # no name of the hub's
        return None
    return Path(found) if isinstance(found, str) else None


def _of_card(text: str) -> str | None:
    card = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    found = (
        dict(re.findall(r"^(license|license_name):[ \t]*['\"]?([^'\"\n#]+?)['\"]?[ \t]*$", card[1], re.M))
        if card
        else {}
    )
    name = found.get("license_name") if found.get("license") == "other" else None
    return name or found.get("license")


def _of_config(text: str) -> str | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    licence = found.get("license") if isinstance(found, dict) else None
    return licence if isinstance(licence, str) else None
