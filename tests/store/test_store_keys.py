"""Keys of attempts, and the door to stores."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.open import existing_store, open_store
from agentlightning.store.server_keys import ServerLock, key_path
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore
from agentlightning.store.tokens import mint_key, verify_key

SECRET = b"s" * 32


@given(st.uuids(), st.integers(0, 2**16 - 1))
def test_a_key_carries_its_attempt(rollout: uuid.UUID, attempt: int) -> None:
    keys = [mint_key(SECRET, str(rollout), attempt, judge) for judge in (False, True)]
    for judge, key in enumerate(keys):
        assert key.startswith("sk-agl-")
        assert verify_key(SECRET, key) == (str(rollout), attempt, bool(judge))
        assert verify_key(b"t" * 32, key) is None
    assert keys[0] != keys[1]


@given(st.integers(7, 52), st.sampled_from("AZaz09-_=+ é"))
def test_a_key_with_any_other_character_is_none(position: int, character: str) -> None:
    key = mint_key(SECRET, str(uuid.UUID(int=7)), 1)
    forged = key[:position] + character + key[position + 1 :]
    # the last character has two bits that mean nothing: another spelling of the same key does no harm
    assert forged == key or verify_key(SECRET, forged) is None or position == len(key) - 1


@given(st.text(max_size=80))
def test_any_text_is_judged_without_an_error(text: str) -> None:
    assert verify_key(SECRET, text) is None
    assert verify_key(SECRET, "sk-agl-" + text) is None


async def test_a_claims_key_is_signed_with_the_stores_secret() -> None:
    from store_samples import claimed

    async with InMemoryLightningStore() as store:
        [claim] = await claimed(store)
        secret = await store.signing_secret()
        assert verify_key(secret, claim.key) == (claim.rollout.id, 1, False)
        assert verify_key(secret, claim.judge_key) == (claim.rollout.id, 1, True)


def test_the_scheme_chooses_the_store() -> None:
    assert isinstance(open_store("memory://"), SqlLightningStore)
    assert isinstance(open_store("sqlite:///x.db"), SqlLightningStore)
    assert isinstance(open_store("http://127.0.0.1:1", "key"), LightningStoreClient)
    assert isinstance(open_store("https://server"), LightningStoreClient)


async def test_a_file_that_is_named_as_a_uri_is_the_same_file(tmp_path: Path) -> None:
    url = f"sqlite:///file:{tmp_path}/agl.db?uri=true"
    with pytest.raises(NotFoundError, match="there is no store yet"):
        existing_store(url)
    async with open_store(url):
        assert (tmp_path / "agl.db").exists()
    async with existing_store(url):
        pass
    assert key_path(url) == tmp_path / "agl.db.server-key"
    with ServerLock(url):
        assert (tmp_path / "agl.db.server-lock").exists()


@pytest.mark.parametrize("url", ["mysql://x", "runs/agl.db", "", "sqlite://", "sqlite:///:memory:", "sqlite:x"])
def test_any_other_url_is_a_setting_that_says_what_was_expected(url: str) -> None:
    with pytest.raises(ConfigError, match=r"memory://.*sqlite:///path"):
        open_store(url)


def test_an_unknown_scheme_is_told_with_all_known_ones_and_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"postgresql://.*redis://") as told:
        open_store("mysql://me:secret@host/agl")

    assert "secret" not in str(told.value)


def test_the_client_loads_neither_a_database_nor_a_web_server() -> None:
    program = (
        "import sys; from agentlightning.store.open import open_store; open_store('http://x');"
        "print(sorted({'sqlalchemy', 'fastapi', 'uvicorn', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
