"""Tokenizers of policies whose trainer is on another host: they come from the store."""

from __future__ import annotations

import gc
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
from gateway_house import House, path

from agentlightning.errors import EngineError
from agentlightning.gateway.policy.engine_router import Renderers
from agentlightning.rendering.model_folder import rendering_files
from agentlightning.rendering.renderer import Renderer

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def kept(house: House) -> dict[str, str]:
    """Hashes of the tokenizer's files, by name, once the store has them."""
    files = rendering_files(house.folder)
    hashes = {name: sha256(data).hexdigest() for name, data in files.items()}
    await house.store.put_files(house.run_id, None, {hashes[name]: data for name, data in files.items()})
    return hashes


async def test_a_policy_s_tokenizer_may_be_files_of_the_run_in_the_store(house: House) -> None:
    house.say("fine")
    by_folder, by_files = await house.claim(), await house.claim("other")
    first = await house.http().post(f"{path(by_folder)}/v1/chat/completions", json=HI)
    await house.serve_policy(tokenizer=await kept(house))
    second = await house.http().post(f"{path(by_files)}/v1/chat/completions", json=HI)
    assert second.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
    one, other = await house.store.calls([by_folder.rollout.id, by_files.rollout.id])
    assert one.suffix_ids == other.suffix_ids


async def test_a_tokenizer_is_loaded_once_and_its_files_go_with_the_gateway(house: House) -> None:
    loaded: list[Path] = []

    def load(folder: str) -> Renderer:
        loaded.append(Path(folder))
        return house.renderer

    renderers, hashes = Renderers(house.store, load), await kept(house)
    assert await renderers.find(house.run_id, hashes) is await renderers.find(house.run_id, dict(hashes))
    [folder] = loaded
    assert rendering_files(folder) == rendering_files(house.folder)
    renderers.close()
    assert not folder.exists()


async def test_of_many_tokenizers_the_last_used_stay_and_the_files_of_others_go_with_their_policies(
    house: House,
) -> None:
    hashes, loaded = await kept(house), list[Path]()

    def load(folder: str) -> Renderer:
        loaded.append(Path(folder))
        return Renderer(folder)

    with closing(Renderers(house.store, load, max_loaded=1)) as renderers:
        in_use = await renderers.find(house.run_id, hashes)
        await renderers.find(house.run_id, {**hashes, "again.json": hashes["tokenizer.json"]})
        assert [folder.exists() for folder in loaded] == [True, True]
        del in_use
        gc.collect()
        assert [folder.exists() for folder in loaded] == [False, True]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        *((["../tokenizer.json"], "expected plain names of files"), (["/etc/passwd"], "expected plain names of files")),
        *(([".hidden"], "expected plain names of files"), ([".."], "expected plain names of files")),
        ([f"{number}.json" for number in range(64)], "expected at most 64 files, 256 MiB in all"),
        *(
            ([""], "cannot be written here"),
            (["a" * 300], "cannot be written here"),
            (["null\0"], "cannot be written here"),
        ),
    ],
)
async def test_a_run_cannot_have_a_gateway_write_elsewhere_without_bounds_or_what_it_can_never_write(
    house: House, more: list[str], said: str
) -> None:
    hashes = await kept(house)
    with closing(Renderers(house.store)) as renderers, pytest.raises(EngineError, match=said):
        await renderers.find(house.run_id, {**hashes, **dict.fromkeys(more, hashes["tokenizer.json"])})


async def test_a_tokenizer_whose_file_the_store_lacks_or_has_with_other_bytes_is_an_error_and_tried_again(
    house: House,
) -> None:
    hashes, missing = await kept(house), sha256(b"{}").hexdigest()
    await house.store.put_files(house.run_id, None, {"0" * 64: b"{}"})
    with closing(Renderers(house.store)) as renderers:
        for wrong in (missing, "0" * 64):
            with pytest.raises(EngineError, match=r"the store does not have 'extra.json' as it was put there"):
                await renderers.find(house.run_id, {**hashes, "extra.json": wrong})
        await house.store.put_files(house.run_id, None, {missing: b"{}"})
        found = await renderers.find(house.run_id, {**hashes, "extra.json": missing})
    assert found.end_ids == house.renderer.end_ids
