"""Who may read the console, and which web pages may not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from agentlightning.console.access import SESSION_S, Access, Sessions, new_sessions
from agentlightning.console.app import PATHS
from agentlightning.console.playground import ROLE
from agentlightning.console.render import STATIC, Templates
from agentlightning.gateway.access import Authentication
from agentlightning.store.sql.store import SqlLightningStore

KEY = "sk-agl-server-of-the-test"
TOKEN = "of-the-url"
HTML = {"accept": "text/html"}


async def pages(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"x-role": scope.get(ROLE, "nobody")}
    await PlainTextResponse("the pages", headers=headers)(scope, receive, send)


@asynccontextmanager
async def browser(
    key: str | None, host: str = "127.0.0.1:7860", sessions: Sessions | None = None, *, entered: bool = True
) -> AsyncIterator[httpx.AsyncClient]:
    """A browser before a console; of one without a key, it has opened the URL that was printed."""
    async with SqlLightningStore("memory://") as store:
        await store.create_run("r", {}, "r")
        tokens = {
            "reader": await store.create_token("reader", "reader"),
            "of one run": await store.create_token("narrow", "reader", "r"),
            "worker": await store.create_token("worker", "worker", "r"),
        }
        access = Access(
            pages,
            Templates(),
            Authentication(store, key) if key else None,
            new_sessions() if sessions is None else sessions,
            token="" if key else TOKEN,
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(access), base_url=f"http://{host}") as client:
            client.secrets = {name: token.secret for name, token in tokens.items()}  # type: ignore[attr-defined]
            if key is None and entered:
                assert (await client.get(f"/?token={TOKEN}")).status_code == 303
            yield client


async def test_this_machine_reads_with_the_token_of_the_printed_url_and_not_without() -> None:
    async with browser(None, entered=False) as client:
        for wrong in ("/", "/?token=", "/?token=of-the-urls", "/live?run=r", "/rollouts"):
            asked = await client.get(wrong, headers=HTML)
            assert asked.status_code == 401
            assert "Token of the URL that it printed" in asked.text
        opened = await client.get(f"/run?run=r&token={TOKEN}&with=s")
        cookie = opened.headers["set-cookie"].lower()
        assert (opened.status_code, opened.headers["location"]) == (303, "/run?run=r&with=s")
        assert TOKEN not in cookie
        assert "secure" not in cookie
        response = await client.get("/")
    assert response.text == "the pages"
    assert response.headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.invalid"},
        {"host": "127.0.0.1.nip.io:7860"},
        {"origin": "https://evil.invalid"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
        {"x-forwarded-for": "10.0.0.1"},
    ],
)
async def test_a_page_of_another_site_reads_nothing(headers: dict[str, str]) -> None:
    async with browser(None) as client:
        response = await client.get("/live", headers=headers)
    assert response.status_code == 403
    assert "the pages" not in response.text


async def test_a_link_on_another_site_leads_here_and_every_page_of_the_navigation_is_let_through() -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    async with browser(None) as client:
        for place in PATHS:
            assert (await client.get(place, headers=headers)).text == "the pages"


@pytest.mark.parametrize("path", ["/upload", "/docs", "/openapi.json", "/static/../etc/passwd", "/run/show"])
async def test_what_is_no_page_is_not_there(path: str) -> None:
    async with browser(None) as client:
        assert (await client.get(path)).status_code == 404


async def test_the_login_page_has_its_style_before_anybody_logged_in_and_nothing_inline_may_run() -> None:
    async with browser(KEY, host="console.example") as client:
        asked = await client.get("/", headers=HTML)
        assert [(await client.get(f"/static/{name}")).status_code for name in STATIC] == [200] * len(STATIC)
    policy = asked.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy


async def test_a_browser_elsewhere_is_asked_for_the_key_and_gets_a_session_for_it() -> None:
    async with browser(KEY, host="console.example:7860") as client:
        asked = await client.get("/", headers=HTML)
        refused = await client.get("/live")
        wrong = await client.post("/login", data={"key": KEY + "x"})
        entered = await client.post("/login", data={"key": KEY})
        after = await client.get("/")
    assert (asked.status_code, refused.status_code, wrong.status_code) == (401, 401, 401)
    assert 'type="password"' in asked.text
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    assert after.text == "the pages"
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert KEY not in cookie


@pytest.mark.parametrize(("name", "status"), [("reader", 200), ("of one run", 401), ("worker", 401)])
async def test_a_token_opens_the_console_where_it_reads_all_runs(name: str, status: int) -> None:
    async with browser(KEY, host="console.example") as client:
        secret = client.secrets[name]  # type: ignore[attr-defined]
        response = await client.get("/", headers={"authorization": f"Bearer {secret}"})
    assert response.status_code == status


async def test_an_application_is_told_who_only_reads() -> None:
    async with browser(KEY, host="console.example") as client:
        secret = client.secrets["reader"]  # type: ignore[attr-defined]
        roles = [
            (await client.get("/", headers={"authorization": f"Bearer {one}"})).headers["x-role"]
            for one in (secret, KEY)
        ]
    async with browser(None) as client:
        assert [*roles, (await client.get("/")).headers["x-role"]] == ["reader", "admin", "admin"]


@pytest.mark.parametrize(
    "path", ["upload", "file=/etc/passwd", "proxy=https://evil.invalid", "info", "queue/../upload", "run/x"]
)
async def test_what_gradio_serves_besides_its_page_is_not_there(path: str) -> None:
    async with browser(None) as client:
        sent = await client.post(f"/playground/gradio_api/{path}", json={})
        read = await client.get(f"/playground/gradio_api/{path}")
    assert (sent.status_code, read.status_code) == (404, 404)


async def test_the_playground_has_a_policy_of_its_own_and_takes_no_form_of_another_site() -> None:
    key = {"authorization": f"Bearer {KEY}"}
    async with browser(KEY, host="console.example") as client:
        page = await client.get("/playground/", headers=key)
        form = await client.post("/playground/gradio_api/queue/join", data={"x": "y"}, headers=key)
        sent = await client.post("/playground/gradio_api/queue/join", json={"x": "y"}, headers=key)
    assert "'unsafe-inline'" in page.headers["content-security-policy"]
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert (form.status_code, sent.status_code) == (403, 200)


async def test_a_form_that_promotes_is_taken_of_a_page_of_the_console_alone() -> None:
    form = {"version": "support@1"}
    for key, host in ((None, "127.0.0.1:7860"), (KEY, "console.example")):
        async with browser(key, host) as client:
            if key:
                await client.post("/login", data={"key": key})
            own = {"origin": f"http://{host}"}
            foreign: list[dict[str, str]] = [{}, {"origin": "null"}, {"origin": f"http://{host}1"}]
            refused = [(await client.post("/models", data=form, headers=one)).status_code for one in foreign]
            as_json = await client.post("/models", json=form, headers=own)
            elsewhere = await client.post("/run", data=form, headers=own)
            taken = await client.post("/models", data=form, headers=own)
        assert (refused, as_json.status_code, elsewhere.status_code) == ([403] * 3, 403, 403)
        assert (taken.status_code, taken.headers["x-role"]) == (200, "admin")


async def test_the_token_can_be_typed_and_a_proxy_with_tls_gets_secure_cookies() -> None:
    async with browser(None, entered=False) as client:
        wrong = await client.post("/login", data={"key": KEY})
        typed = await client.post("/login", data={"key": TOKEN})
        assert (wrong.status_code, typed.status_code) == (401, 303)
        assert (await client.get("/")).text == "the pages"
    async with browser(KEY, host="console.example") as client:
        client.base_url = httpx.URL("https://console.example")  # as uvicorn has it of X-Forwarded-Proto
        assert (await client.get(f"/?token={KEY}", headers=HTML)).status_code == 401  # no key belongs into an address
        assert "secure" in (await client.post("/login", data={"key": KEY})).headers["set-cookie"].lower()


async def test_a_session_ends() -> None:
    now = 0.0
    sessions = new_sessions(clock=lambda: now)
    async with browser(KEY, host="console.example", sessions=sessions) as client:
        await client.post("/login", data={"key": KEY})
        before = (await client.get("/")).status_code
        now = SESSION_S
        after = (await client.get("/")).status_code
    assert (before, after) == (200, 401)


async def test_a_form_of_another_site_logs_nobody_in_and_sends_nothing() -> None:
    async with browser(KEY, host="console.example") as client:
        login = await client.post("/login", data={"key": KEY}, headers={"origin": "https://evil.invalid"})
        form = await client.post("/login", json={"key": KEY})
    assert (login.status_code, form.status_code) == (403, 403)
