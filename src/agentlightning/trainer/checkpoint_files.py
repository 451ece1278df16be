"""Checkpoints: saved, recorded, found again, deleted and registered as model versions.

They lie in the run's folder and, where one is configured, at a URL. The training loop drives it, and whoever needs a run's
last weights. A checkpoint in the store is whole at its place; one at a URL is copied into the run's folder of this host
before anybody reads it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentlightning.config.run import Config, TrainerConfig
from agentlightning.engines.base import DEFAULT_POLICY, Engine
from agentlightning.engines.folders import LEARNER_FOLDER, LEARNER_STATE, MANIFEST, UrlFolder, damage, seal
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError
from agentlightning.records import JSON, Checkpoint
from agentlightning.runtime.disk import file_hash, sync
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion
from agentlightning.trainer.checkpoint import Fingerprint, RunFolder, checkpoint_damage, checkpoint_folders

HASH = "#sha256="
"""Separates the URL of a checkpoint from the hash of its manifest, in the store."""

log = logging.getLogger(__name__)


def check_checkpoint_url(settings: TrainerConfig) -> None:
    """MissingExtraError where the URL needs a package that is not here, ConfigError where it is of a disk that is not."""
    url = settings.checkpoint_url
    if url is None:
        return
    UrlFolder(url)
    if url.startswith("file://") and not Path(url.removeprefix("file://")).is_dir():
        raise ConfigError(f"trainer.checkpoint_url: {url} is no folder here; mount the shared disk, or make the folder")


async def save_checkpoint(
    store: LightningStore,
    engine: Engine,
    folder: RunFolder,
    step: int,
    version: int,
    settings: TrainerConfig,
    policies: Sequence[str] = (DEFAULT_POLICY,),
) -> Checkpoint:
    """Save weights and learner state, then record them: a checkpoint in the store is whole and on the disk, or at its URL.

    Keeps the last `settings.keep_checkpoints`, and those of model versions that are in use. Killed before the record, the
    next save of this step does it again.
    """
    path = (folder.path / "checkpoints" / _name(step)).resolve()
    for policy, one in checkpoint_folders(path, policies).items():
        await engine.save(one, policy)
    for named in (path, *path.parents[:3]):  # up to the one that holds the run's
        await asyncio.to_thread(sync, named)
    place = str(path)
    if settings.checkpoint_url is not None:
        if len(policies) > 1:
            await asyncio.to_thread(seal, path)  # with one manifest of all of them, none is whole without the others
        copy = UrlFolder(f"{settings.checkpoint_url}/{folder.run_id}/{path.name}")
        place = f"{copy.url}{HASH}{await copy.upload(path)}"
    checkpoint = Checkpoint(run_id=folder.run_id, step=step, path=place, version=version)
    await store.put_checkpoint(checkpoint)
    await _delete_old(store, step, folder, settings)
    return checkpoint


async def _delete_old(store: LightningStore, step: int, folder: RunFolder, settings: TrainerConfig) -> None:
    """Delete what is not among the last ones up to this step, of this run: who may write to the store must not choose what
    goes here. Later ones stay: where they are damaged, the run went on from before them and saves them again."""
    recorded = await store.checkpoints(folder.run_id)
    old = [one for one in recorded if one.step <= step][: -settings.keep_checkpoints]
    used = await _in_use(store, folder.run_id, {one.step for one in old})
    old = [one for one in old if one.step not in used]
    for one in old:
        path = local_folder(one, folder)
        if path.resolve().parent == (folder.path / "checkpoints").resolve():
            shutil.rmtree(path, ignore_errors=True)
    if settings.checkpoint_url is None:
        return
    kept = {_name(one.step) for one in recorded} - {_name(one.step) for one in old}
    copies = UrlFolder(f"{settings.checkpoint_url}/{folder.run_id}")
    try:
        for name in await copies.names():  # also half a copy, whose trainer was killed
            if re.fullmatch(r"step-\d{6,}", name) and name not in kept:
                await copies.delete(name)
    except StoreError as why:
        log.warning("old checkpoints stay until the next one is saved: %s", why)


async def _in_use(store: LightningStore, run_id: str, steps: set[int]) -> set[int]:
    """Marks the model versions of these steps as deleted, before their files go; returns the steps of those in use."""
    used = set()
    for version in await store.models(run_id=run_id):
        if version.step in steps and not version.deleted:
            try:
                await store.delete_model(version.name, version.number)
            except ConflictError:  # named by an alias: looked at again with the next checkpoint
                used.add(version.step)
    return used


async def last_checkpoint(store: LightningStore, folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint that is as it was written, with the path of its folder on this host; None before the first.

    One at a URL is copied into the run's folder where it is not there. One that a power cut or a disk has damaged is passed
    over with a warning. NotFoundError where no one is whole.
    """
    recorded = await store.checkpoints(folder.run_id)
    damaged = []
    for checkpoint in reversed(recorded):
        path = local_folder(checkpoint, folder)
        url, is_url, manifest_hash = checkpoint.path.partition(HASH)
        if not is_url:
            found = await asyncio.to_thread(checkpoint_damage, path)
        elif await asyncio.to_thread(_is_copy, path, manifest_hash):
            found = None
        else:
            folder.make()
            found = await UrlFolder(url).download(manifest_hash, path)
        if found:
            damaged.append(f"{url}: {found}")
        elif found is None:
            for sentence in damaged:
                log.warning("damaged checkpoint passed over: %s", sentence)
            return replace(checkpoint, path=str(path))
    if damaged:
        raise NotFoundError(f"{folder.run_id}: no checkpoint is whole ({'; '.join(damaged)}); start the run again")
    if recorded:
        raise NotFoundError(
            f"{folder.run_id}: its checkpoint {recorded[-1].path.partition(HASH)[0]} is not here: resume the run on the "
            "host whose folder that is, or start it again if it no longer exists; with trainer.checkpoint_url any host can "
            "resume"
        )
    return None


def local_folder(checkpoint: Checkpoint, folder: RunFolder) -> Path:
    """Folder of a checkpoint on this host, where it may not be yet."""
    if HASH not in checkpoint.path:
        return Path(checkpoint.path)
    return (folder.path / "checkpoints" / _name(checkpoint.step)).resolve()


def _is_copy(path: Path, manifest_hash: str) -> bool:
    """True where a folder is whole, and the one that was recorded: another history of the run has the same steps."""
    manifest = path / MANIFEST
    return manifest.is_file() and file_hash(manifest) == manifest_hash and damage(path) is None


def _name(step: int) -> str:
    return f"step-{step:06d}"


async def load_checkpoint(engine: Engine, checkpoint: Checkpoint, policies: Sequence[str] = (DEFAULT_POLICY,)) -> None:
    """Every policy back to its saved state."""
    for policy, one in checkpoint_folders(Path(checkpoint.path), policies).items():
        await engine.load(one, policy)


ADAPTER = "adapter"
"""Folder of the low-rank adapter inside a saved policy, where one was trained."""
Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registrar:
    """Registers the recorded checkpoints of one run as model versions of each policy, with what made them.

    A version is registered once, however often a trainer is killed, and never before its weights are whole.
    """

    store: LightningStore
    config: Config
    folder: RunFolder
    policies: Sequence[str]
    made_of: Fingerprint

    async def register(self, step: int) -> list[ModelVersion]:
        """The versions of the checkpoint of `step`, which is whole in the run's folder here. None of step 0, whose weights
        are those that training starts from."""
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
        name, several = config.model.name or run_id, len(self.policies) > 1
        policy = config.policies.get(alias)
        given = (policy and policy.model) or config.model.path
        source = await self._source(given)
        before = [one for one in own if one.policy == alias and one.step < checkpoint.step]
        published = await self.store.resources(run_id, alias, latest=False, version=checkpoint.version)
        return ModelVersion(
            name=f"{name}-{alias}" if several else name,
            number=0,
            run_id=run_id,
            policy=alias,
            step=checkpoint.step,
            resource_version=checkpoint.version,
            parent=before[-1].reference if before else (given if source is None else source.reference),
            base_model=given if source is None else source.base_model,
            weights=await asyncio.to_thread(weights_of, checkpoint, path, alias if several else ""),
            prompts=dict(published[0].value.get("prompts") or {}) if published else {},
            config_hash=self.made_of.config,
            code_hash=self.made_of.code,
            data_hash=self.made_of.data,
            metrics=metrics,
            licence=await asyncio.to_thread(licence_of, given) if source is None else source.licence,
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
        for kind in ("greedy", "sampled"):
            numbers: dict[str, dict[int, float]] = {}
            for what in ("reward_mean", "reward_stderr", "tasks"):
                rows = await self.store.metrics(self.folder.run_id, f"eval/{kind}/{what}")
                numbers[what] = {row.step: row.value for row in rows if not row.abandoned and row.step <= step}
            if whole := set.intersection(*(set(each) for each in numbers.values())):
                mean, error, tasks = (each[max(whole)] for each in numbers.values())
                interval = {"low": mean - Z * error, "high": mean + Z * error}
                found[f"eval/{kind}/reward"] = {"mean": mean, **interval, "n": int(tasks), "step": max(whole)}
        return found


def weights_of(checkpoint: Checkpoint, folder: Path, alias: str = "") -> JSON:
    """The weights of a saved policy, as a version has them: where they are, what they are known by, and how large they are.

    folder: of the policy, here. alias: its name where the checkpoint has several. Raises OSError.
    """
    url, at_url, _ = checkpoint.path.partition(HASH)
    manifest, learners = folder / MANIFEST, (LEARNER_STATE, LEARNER_FOLDER, MANIFEST)
    files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in learners]
    return {
        "kind": "adapter" if (folder / ADAPTER).is_dir() else "full",
        "url": f"{url}/{alias}".rstrip("/") if at_url else f"file://{folder}",
        "manifest_hash": file_hash(manifest) if manifest.is_file() else "",
        "bytes": sum(path.stat().st_size for path in files),
    }


def licence_of(model: str) -> str | None:
    """The licence of a model's card: ``license:`` in the YAML that README.md begins with, or ``license_name:`` where that is
    ``other``. None where there is none here; asks no hub."""
    card = Path(model).expanduser() / "README.md"
    if not card.parent.is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            card = Path(str(try_to_load_from_cache(model, "README.md")))
        except (ImportError, ValueError):  # no name of the hub's
            return None
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    yaml = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    found = dict(
        re.findall(r"^(license|license_name):[ \t]*['\"]?([^'\"\n#]+?)['\"]?[ \t]*$", yaml[1] if yaml else "", re.M)
    )
    return found.get("license_name") if found.get("license") == "other" else found.get("license")
