"""``agl models`` and ``agl train --rerun``: versions are listed, promoted, rolled back, described and exported."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import Result
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.config.run import parse_config, run_record
from agentlightning.engines.folders import MANIFEST, seal
from agentlightning.errors import ConfigError, ConflictError, InputError, NotFoundError, StoreError
from agentlightning.runtime.disk import file_hash
from agentlightning.store.models import ModelVersion
from agentlightning.store.open import open_store
from agentlightning.trainer.checkpoint import RunFolder, take_fingerprint
from agentlightning.trainer.model_weights import with_versions


def saved(folder: Path, adapter: bool = False) -> dict[str, Any]:
    """A checkpoint's folder, and the weights of its version."""
    folder.mkdir(parents=True)
    for name in ("learner.pt", "config.json", "model.safetensors"):
        (folder / name).write_text(f"{folder.name} {name}")
    if adapter:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/there", "r": 8}')
        (folder / "adapter" / "adapter_model.safetensors").write_text("adapter")
        seal(folder / "adapter")
    seal(folder)
    kind = "adapter" if adapter else "full"
    return {"kind": kind, "url": f"file://{folder}", "manifest_hash": file_hash(folder / MANIFEST), "bytes": 3}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store with the versions support@10 and support@20, the latter an adapter."""
    url = f"sqlite:///{tmp_path}/agl.db"
    metrics = {"eval/greedy/reward": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 300}}

    async def make() -> None:
        async with open_store(url) as store:
            await store.create_run("r", {}, "r")
            for step in (10, 20):
                await store.register_model(
                    ModelVersion(
                        name="support",
                        number=0,
                        run_id="r",
                        policy="default",
                        step=step,
                        resource_version=step + 1,
                        parent="base/model",
                        base_model="base/model",
                        weights=saved(tmp_path / f"step-{step}", adapter=step == 20),
                        metrics=metrics,
                    )
                )

    asyncio.run(make())
    return url


def models(url: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["models", *words, "--store", url])


def said(url: str, *words: str) -> str:
    result = models(url, *words)
    assert result.exit_code == 0, result.exception
    return result.output


def refused(kind: type[Exception], url: str, *words: str) -> str:
    result = models(url, *words)
    assert isinstance(result.exception, kind), result.exception
    return str(result.exception)


def test_versions_are_promoted_listed_and_rolled_back(url: str) -> None:
    assert said(url, "promote", "support@10", "production") == "support@production is support@10\n"
    assert "before it was support@10" in said(url, "promote", "support@20", "@production")
    listed = said(url, "list")
    assert "support@20  @production" in listed
    assert "0.500 [0.400, 0.600]" in listed
    assert said(url, "rollback", "support") == "support@production is support@10; before it was support@20\n"
    assert json.loads(said(url, "list", "support", "--json"))["aliases"][0]["number"] == 10
    assert json.loads(said(url, "show", "support@production", "--json"))["step"] == 10
    shown = said(url, "show", "support@10")
    assert "base/model" in shown
    assert "n = 300" in shown
    assert "no model version yet" in said(url, "list", "other")


def test_mistakes_are_one_sentence(url: str) -> None:
    assert "no such model version: support@11" in refused(NotFoundError, url, "show", "support@11")
    assert "no such alias: support@best" in refused(NotFoundError, url, "show", "support@best")
    assert "expected NAME@NUMBER or NAME@ALIAS" in refused(InputError, url, "promote", "support", "best")
    assert "alias: expected small letters" in refused(InputError, url, "promote", "support@10", "Best")
    assert "no such alias" in refused(NotFoundError, url, "rollback", "support")
    assert "expected an alias" in refused(InputError, url, "rollback", "support@10")
    said(url, "promote", "support@10", "best")
    assert "named no other version before 10" in refused(NotFoundError, url, "rollback", "support@best")


def test_weights_are_exported_as_a_folder_and_as_an_adapter(url: str, tmp_path: Path) -> None:
    said(url, "export", "support@10", "--to", str(tmp_path / "hf"))
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
    said(url, "export", "support@20", "--format", "peft", "--to", str(tmp_path / "peft"))
    assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    table = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert table == {"base_model_name_or_path": "base/model", "r": 8}
    to = ["--format", "peft", "--to", str(tmp_path / "none")]
    assert "has no adapter" in refused(ConfigError, url, "export", "support@10", *to)
    assert "not an empty folder" in refused(ConfigError, url, "export", "support@10", "--to", str(tmp_path / "hf"))


def test_weights_that_are_not_as_they_were_are_not_exported(url: str, tmp_path: Path) -> None:
    (tmp_path / "step-10" / "model.safetensors").write_text("something else")
    to = ["--to", str(tmp_path / "hf")]
    assert "are damaged: model.safetensors has" in refused(NotFoundError, url, "export", "support@10", *to)
    (tmp_path / "step-20").rename(tmp_path / "moved")
    assert "are not here" in refused(NotFoundError, url, "export", "support@20", *to)


def converter(tmp_path: Path, text: str) -> dict[str, str]:
    """The environment with a program in the place of llama.cpp's converter."""
    folder = tmp_path / "programs"
    folder.mkdir(exist_ok=True)
    program = folder / "convert_hf_to_gguf.py"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o700)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_gguf_is_what_the_converter_makes_of_the_folder(url: str, tmp_path: Path) -> None:
    words = ["models", "export", "support@10", "--format", "gguf", "--to", str(tmp_path / "gguf"), "--store", url]
    missing = CliRunner().invoke(app, words, env={"PATH": str(tmp_path / "nothing")})
    assert isinstance(missing.exception, ConfigError)
    assert "gguf needs llama.cpp's converter" in str(missing.exception)
    failing = converter(tmp_path, 'echo "Model TinyForCausalLM is not supported" >&2; exit 1')
    failed = CliRunner().invoke(app, words, env=failing)
    assert isinstance(failed.exception, StoreError)
    assert "could not convert it: Model TinyForCausalLM is not supported" in str(failed.exception)
    made = CliRunner().invoke(app, words, env=converter(tmp_path, 'ls "$1" > "$3"'))
    assert made.exit_code == 0, made.exception
    assert (tmp_path / "gguf" / "support-10.gguf").read_text() == "config.json\nmodel.safetensors\n"
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_setting_that_names_a_version_becomes_the_folder_of_its_weights(url: str, tmp_path: Path) -> None:
    said(url, "promote", "support@20", "production")
    table: dict[str, Any] = {"agent": {"run": "a.py:f"}, "data": {"train": "t"}, "store": {"url": url}}
    one = with_versions(parse_config({**table, "model": {"path": "support@production"}}), tmp_path)
    assert one.model.path == str(tmp_path / "step-20")
    policies = {"writer": {"model": "support@10"}, "critic": {}}
    two = with_versions(parse_config({**table, "model": {"path": "base"}, "policies": policies}), tmp_path)
    assert (two.model.path, two.policies["writer"].model) == ("base", str(tmp_path / "step-10"))
    assert two.policies["critic"].model is None
    with pytest.raises(NotFoundError, match=r"model\.path: no such alias: support@best"):
        with_versions(parse_config({**table, "model": {"path": "support@best"}}), tmp_path)


def test_a_run_with_other_code_or_data_is_not_started_again(tmp_path: Path) -> None:
    url, agent, tasks = f"sqlite:///{tmp_path}/agl.db", tmp_path / "agent.py", tmp_path / "train.jsonl"
    agent.write_text("async def solve(task, llm): return 0.0")
    tasks.write_text('{"a": 1}\n')
    config = parse_config(
        {
            "model": {"path": str(tmp_path / "nowhere")},
            "agent": {"run": f"{agent}:solve"},
            "data": {"train": str(tasks)},
            "store": {"url": url},
        }
    )

    async def make() -> None:
        async with open_store(url) as store:
            await store.create_run("first", run_record(config), "r")
            await store.update_run("r", state="finished", summary=take_fingerprint(config, [{"a": 1}]).summary())

    asyncio.run(make())

    def rerun(*words: str) -> str:
        given = ["--store", url, "--runs", str(tmp_path / "runs"), *words]
        return str(CliRunner().invoke(app, ["train", "--rerun", "r", *given]).exception)

    assert "only its record says what code it ran" in rerun()
    RunFolder(tmp_path / "runs", "r").create(config)
    RunFolder(tmp_path / "runs", "r").keep_fingerprint(take_fingerprint(config, [{"a": 1}]))
    started = rerun()  # refused for what it lacks: its record is the same
    assert "nowhere" in started
    tasks.write_text('{"a": 2}\n')
    assert "data changed since the run was last started; to start it anyway, add --changed-ok" in rerun()
    agent.write_text("async def solve(task, llm): return 1.0")
    assert "code and data changed since the run was last started" in rerun()
    assert rerun("--changed-ok") == started
    assert "takes all settings from that run" in rerun("--set", "trainer.steps=3")


def test_a_version_whose_weights_were_deleted_is_listed_on_demand(url: str) -> None:
    async def delete() -> None:
        async with open_store(url) as store:
            await store.delete_model("support", 10)

    asyncio.run(delete())
    assert "support@10" not in said(url, "list")
    assert "deleted" in said(url, "list", "--all")
    assert "its weights were deleted" in refused(ConflictError, url, "promote", "support@10", "best")


def test_a_seed_is_refused_where_nothing_is_random() -> None:
    refused = CliRunner().invoke(app, ["models", "import", "model.gguf", "--seed", "3"])
    assert "--seed: expected FILE.jsonl" in str(refused.exception)


@pytest.mark.slow
def test_a_killed_imitation_leaves_no_model(tmp_path: Path) -> None:
    demos, model = tmp_path / "demos.jsonl", tmp_path / "model"
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "left right left"}]
    demos.write_bytes(b"\n".join([orjson.dumps({"messages": turns})] * 200))
    command = [sys.executable, "-m", "agentlightning", "models", "import", str(demos), "--to", str(model)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(tmp_path.glob(".model.*/model.safetensors")):
            assert not model.exists()
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not model.exists()
