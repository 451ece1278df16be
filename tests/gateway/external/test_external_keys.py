"""Which variables of the server go where: its operator says it, and no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from external_server import ExternalServer
from gateway_house import SERVER_KEY, House, path

from agentlightning.config.external import ExternalModelConfig
from agentlightning.config.run import parse_settings
from agentlightning.errors import ConfigError
from agentlightning.gateway.external_keys import ExternalKeys, external_keys, host_of, pairs_of, read_file
from agentlightning.records import Resource

ASKED: Any = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("variable", "url", "sent"),
    [
        ("OPENAI_API_KEY", "https://api.openai.com/v1", True),
        ("OPENAI_API_KEY", "https://API.OPENAI.COM:443/v1", True),
        ("OPENAI_API_KEY", "https://api.openai.com.evil.example/v1", False),
        ("OPENAI_API_KEY", "https://api.openai.com@evil.example/v1", False),
        ("OPENAI_API_KEY", "https://evil.example/api.openai.com", False),
        ("OPENAI_API_KEY", "https://evil.example", False),
        ("LOCAL_KEY", "http://127.0.0.1:8000/v1", True),
        ("LOCAL_KEY", "http://127.0.0.1:8001/v1", False),
        ("LOCAL_KEY", "http://[::1]:8000/v1", True),
        ("OPENAI_API_KEY", "http://api.openai.com/v1", False),
        ("OPENAI_API_KEY", "http://api.openai.com:443/v1", False),
        ("LOCAL_KEY", "http://localhost:9000/v1", True),
        ("LOCAL_KEY", "http://models.lan/v1", True),
        ("LOCAL_KEY", "http://models.lan:8000/v1", False),
        ("HOME", "https://api.openai.com/v1", False),
        ("OPENAI_API_KEY", None, False),
        ("OPENAI_API_KEY", "http://[", False),
        (["OPENAI_API_KEY"], "https://api.openai.com/v1", False),
        (None, "https://evil.example", True),
    ],
)
def test_a_variable_goes_to_the_hosts_that_are_listed_and_to_no_other(variable: Any, url: Any, sent: bool) -> None:
    local = [f"LOCAL_KEY={host}" for host in ("127.0.0.1:8000", "[::1]:8000", "localhost", "models.lan:80")]
    listed = external_keys(["OPENAI_API_KEY=api.openai.com", *local])
    assert (listed.refusal(variable, [url]) is None) == sent
    assert (ExternalKeys().refusal(variable, [url]) is None) == (variable is None)


def test_a_file_lists_hosts_by_variable(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('A_KEY = ["a.example", "b.example:8080"]\n')
    assert read_file(file) == ["A_KEY=a.example", "A_KEY=b.example:8080"]
    for wrong in ('A_KEY = "a.example"', "A_KEY = [1]", "A_KEY"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="--external-keys"):
            read_file(file)
    for pair in ("AGL_SERVER_KEY=a.example", "a_key=a.example", "A_KEY", "A_KEY=https://a.example", "A_KEY=*"):
        with pytest.raises(ConfigError, match="expected a variable and a host"):
            external_keys([pair])


@pytest.mark.parametrize("place", ["http://127.0.0.1:9000", "http://models.lan", "https://models.lan"])
def test_what_a_configuration_names_is_what_its_own_server_sends(place: str) -> None:
    table = {"url": f"{place}/v1", "models": ["m"], "key_env": "A_KEY"}
    model = parse_settings(ExternalModelConfig, table, "external.m")
    listed = external_keys(pairs_of({"A_KEY": [host_of(model.url)]}))
    assert listed.refusal("A_KEY", [model.url]) is None
    assert listed.refusal("A_KEY", ["http://127.0.0.1:9001/v1"]) is not None


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("external", {"url": "http://evil.example/v1", "models": ["m"], "key_env": "JUDGE_KEY"}),
        ("external", {"url": "http://127.0.0.1/v1", "models": ["m"], "key_env": "HOME"}),
        ("policy", {"endpoints": ["http://127.0.0.1", "http://evil.example"], "key_env": "JUDGE_KEY"}),
    ],
)
async def test_a_resource_that_would_send_a_key_elsewhere_is_not_stored_whoever_asks(
    house: House, kind: str, value: dict[str, Any]
) -> None:
    resource = {"run_id": house.run_id, "name": "judge", "kind": kind, "value": value}
    headers = {"authorization": f"Bearer {SERVER_KEY}"}
    reply = await house.http().post("/api/put_resources", json={"resources": [resource]}, headers=headers)
    assert reply.status_code == 403
    assert "the operator of this server does not let" in reply.json()["error"]["message"]
    assert "judge" not in {one.name for one in await house.store.resources(house.run_id)}


async def test_a_resource_that_is_stored_already_sends_no_key_that_the_operator_does_not_list(
    house: House, external: ExternalServer
) -> None:
    value = {"url": external.url, "models": ["gpt-4o"], "key_env": "JUDGE_KEY"}
    await house.store.put_resources([Resource(run_id=house.run_id, name="judge", kind="external", value=value)])
    claim = await house.claim()
    strict = house.gateway(external_keys=external_keys(["JUDGE_KEY=api.openai.com"]))
    reply = await house.http(strict).post(f"{path(claim)}/v1/chat/completions", json=ASKED)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "external_misconfigured")
    assert external.requests == []
    assert (await house.http().post(f"{path(claim)}/v1/chat/completions", json=ASKED)).status_code == 200
    assert len(external.requests) == 1


async def test_a_policy_that_is_stored_already_sends_no_key_either(house: House) -> None:
    await house.serve_policy(key_env="JUDGE_KEY")
    claim = await house.claim()
    strict = house.gateway(external_keys=ExternalKeys())
    reply = await house.http(strict).post(f"{path(claim)}/v1/chat/completions", json={**ASKED, "model": "policy"})
    assert reply.status_code == 502
    assert "does not let 'JUDGE_KEY' be sent" in reply.json()["error"]["message"]
    assert house.engine.requests == []
