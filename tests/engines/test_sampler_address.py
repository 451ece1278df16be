"""Addresses of samplers: what other machines reach asks for a key."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.config.engine import EngineConfig
from agentlightning.config.run import parse_config
from agentlightning.engines.sampler_address import SamplerAddress
from agentlightning.errors import ConfigError
from agentlightning.gateway.external_keys import external_keys
from agentlightning.trainer.processes import key_arguments


def test_by_default_a_sampler_takes_a_free_port_that_this_machine_alone_reaches() -> None:
    address = SamplerAddress.of(EngineConfig())
    with address.listen() as one, address.listen(1) as other:
        assert address.url(one).startswith("http://127.0.0.1:")
        assert address.url(one) != address.url(other)
    assert address.headers == {}


def test_samplers_take_the_ports_from_the_one_that_is_given_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SAMPLER_KEY", "secret")
    with SamplerAddress().listen() as free:
        port = free.getsockname()[1]
    address = SamplerAddress.of(EngineConfig(listen=f"127.0.0.1:{port}", key_env="A_SAMPLER_KEY"))
    with address.listen() as one:
        assert address.url(one) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=rf"engine.listen: sampler 0 cannot listen at 127.0.0.1:{port}"):
            address.listen()
    assert address.headers == {"Authorization": "Bearer secret"}
    assert "secret" not in repr(address)


URL = "https://sampler.example.com"


def test_what_gateways_are_told_may_be_another_address_than_the_one_it_listens_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_SAMPLER_KEY", "secret")
    address = SamplerAddress.of(EngineConfig(listen="0.0.0.0:9000", advertise=(URL,), key_env="A_SAMPLER_KEY"))
    assert list(address.advertise) == [URL]


@pytest.mark.parametrize(
    ("settings", "key", "sentence"),
    [
        ({"listen": "10.1.2.3:9000"}, None, "engine.key_env is needed"),
        ({"listen": "sampler.lan:9000"}, None, "engine.key_env is needed"),
        ({"listen": "127.0.0.1:9000", "advertise": (URL,)}, None, "engine.key_env is needed"),
        ({"listen": "0.0.0.0:9000"}, "secret", "engine.listen: expected the address by which gateways reach"),
        ({"listen": "10.1.2.3:9000"}, "", "A_SAMPLER_KEY is not set"),
        (
            {"listen": "127.0.0.1:9000", "advertise": (URL, URL)},
            "secret",
            "expected a URL for each of 1 samplers, got 2",
        ),
        ({}, "schlüssel", "engine.key_env: the key in A_SAMPLER_KEY has characters"),
        ({}, "two\nlines", "engine.key_env: the key in A_SAMPLER_KEY has characters"),
    ],
)
def test_an_address_that_others_reach_needs_a_key_that_is_set(
    settings: dict[str, Any], key: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key is not None:
        settings = {**settings, "key_env": "A_SAMPLER_KEY"}
        monkeypatch.setenv("A_SAMPLER_KEY", key)
    with pytest.raises(ConfigError, match=sentence):
        SamplerAddress.of(EngineConfig(**settings))


def test_an_address_of_no_such_machine_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SAMPLER_KEY", "secret")
    address = SamplerAddress.of(EngineConfig(listen="192.0.2.1:9000", key_env="A_SAMPLER_KEY"))
    with pytest.raises(ConfigError, match=r"engine\.listen: sampler 2 cannot listen at 192\.0\.2\.1:9002"):
        address.listen(2)


def test_the_server_of_a_run_sends_the_key_to_the_port_of_each_of_its_samplers() -> None:
    sampler = {"type": "vllm", "python": "python", "gpus": ["0", "1"]}
    table = {
        "model": {"path": "model"},
        "agent": {"run": "agent.py:solve"},
        "data": {"train": "tasks.jsonl"},
        "engine": {"sampler": sampler, "listen": "10.1.2.3:9000", "key_env": "A_SAMPLER_KEY"},
    }
    allowed = external_keys(key_arguments(parse_config(table, "settings"))[1::2])
    assert allowed.refusal("A_SAMPLER_KEY", ["http://10.1.2.3:9000", "http://10.1.2.3:9001"]) is None
    assert allowed.refusal("A_SAMPLER_KEY", ["http://10.1.2.3:9002"]) is not None


@pytest.mark.parametrize(
    "url", ["sampler:9000", "http://", "http://sampler:99999", "http://[::1", "http://me:word@sampler"]
)
def test_what_gateways_are_told_is_the_url_of_a_server_without_a_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"advertise\.0: expected http\(s\)://HOST:PORT without user"):
        EngineConfig(listen="0.0.0.0:9000", advertise=(url,), key_env="A_SAMPLER_KEY")


def test_a_key_of_our_own_is_no_sampler_s() -> None:
    with pytest.raises(ConfigError, match=r"key_env: a variable of Agent Lightning's own"):
        EngineConfig(key_env="AGL_SERVER_KEY")
