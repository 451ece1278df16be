"""HTTP clients: requests to the gateway say which agent makes them and within which span, whatever library sends them.

A worker installs `ContextPropagator` once in its process. It reaches every client of httpx, httpx2 and aiohttp, and all that
stands on the standard library's http.client (requests, urllib3, urllib): those that an agent was given and those that it or
its framework builds. Requests to any other host are left as they are, and so is what an agent says of itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from urllib.parse import quote, urlsplit

from agentlightning.tracing.frameworks import current_agent, current_span

AGENT_HEADER = "x-agl-agent"
AGENT_BAGGAGE = "agl.agent"
"""In W3C baggage, for names that a header cannot carry."""


def context_headers() -> dict[str, str]:
    """The headers for a model call sent now: x-agl-agent (outside ASCII in baggage, percent-encoded), traceparent and
    baggage, each where there is one."""
    found: dict[str, str] = {}
    told: list[str] = []
    if (agent := current_agent()) is not None:
        if agent.isascii() and agent.isprintable():
            found[AGENT_HEADER] = agent
        else:
            told.append(f"{AGENT_BAGGAGE}={quote(agent, safe='')}")
    span = current_span()
    if span is not None and (here := span.get_span_context()).is_valid:
        found["traceparent"] = f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}"
    if (baggage := sys.modules.get("opentelemetry.baggage")) is not None:
        told += [f"{quote(key, safe='')}={quote(str(value), safe='')}" for key, value in baggage.get_all().items()]
    return found | {"baggage": ",".join(told)} if told else found


class ContextPropagator:
    """Adds `context_headers` to requests for one server, whatever library of this process sends them, from `install` to
    `remove`.

    server_url: the gateway, as agents reach it.
    """

    def __init__(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._patched: list[tuple[type, str, Any]] = []
        self._watch = ImportHook(dict.fromkeys(_PATCHES, self._patch))

    def install(self) -> None:
        """Reach the libraries that are loaded now, and others once they are."""
        self._watch.start()

    def remove(self) -> None:
        """Leave every library as it was."""
        self._watch.stop()
        while self._patched:
            owner, name, original = self._patched.pop()
            setattr(owner, name, original)

    def _patch(self, module: ModuleType) -> None:
        for path, wrap in _PATCHES[module.__name__]:
            owner_name, _, name = path.partition(".")
            owner = getattr(module, owner_name, None)
            original = getattr(owner, name, None)
            if (
                isinstance(owner, type)
                and original is not None
                and not any(entry[:2] == (owner, name) for entry in self._patched)
            ):
                self._patched.append((owner, name, original))
                setattr(owner, name, functools.wraps(original)(wrap(original, self)))

    def serves(self, host: str, port: int | None, scheme: str = "http") -> bool:
        """Returns whether this is the gateway's address; no port means the scheme's own."""
        return host == self._host and (port or (443 if scheme == "https" else 80)) == self._port


def _httpx(original: Callable[..., Any], context: ContextPropagator) -> Callable[..., Any]:
    """Of Client.send and AsyncClient.send, which every request goes through, streamed ones and other transports' too."""

    def send(client: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        url = request.url
        if context.serves(url.host, url.port, url.scheme):
            for name, value in context_headers().items():
                request.headers.setdefault(name, value)
        return original(client, request, *arguments, **options)

    return send


def _aiohttp(original: Callable[..., Any], context: ContextPropagator) -> Callable[..., Any]:
    """Of ClientSession._request, which all of a session's verbs go through; a session's own hooks bind when it is made."""
    from multidict import CIMultiDict  # comes with aiohttp, which is there

    def request(session: Any, method: str, str_or_url: Any, **options: Any) -> Any:
        parts = urlsplit(str(str_or_url))
        if not parts.netloc and (base := getattr(session, "_base_url", None)) is not None:
            parts = urlsplit(str(base))
        if context.serves(parts.hostname or "", parts.port, parts.scheme):
            headers = CIMultiDict(options.get("headers") or {})
            of_session = getattr(session, "headers", {})  # these go with every request of its own
            for name, value in context_headers().items():
                if name not in of_session:
                    headers.setdefault(name, value)
            options["headers"] = headers
        return original(session, method, str_or_url, **options)

    return request


def _http_client(original: Callable[..., Any], context: ContextPropagator) -> Callable[..., Any]:
    """Of HTTPConnection.endheaders: the last moment at which a request of the standard library takes headers."""

    def endheaders(connection: Any, *arguments: Any, **options: Any) -> Any:
        if context.serves(connection.host, connection.port, "https" if hasattr(connection, "_context") else "http"):
            given = {line.partition(b":")[0].lower().decode("latin-1") for line in connection._buffer[1:]}
            for name, value in context_headers().items():
                if name not in given:
                    connection.putheader(name, value)
        return original(connection, *arguments, **options)

    return endheaders


_PATCHES: dict[str, Sequence[tuple[str, Callable[[Callable[..., Any], ContextPropagator], Callable[..., Any]]]]] = {
    "httpx": (("Client.send", _httpx), ("AsyncClient.send", _httpx)),
    "httpx2": (("Client.send", _httpx), ("AsyncClient.send", _httpx)),
    "aiohttp": (("ClientSession._request", _aiohttp),),
    "http.client": (("HTTPConnection.endheaders", _http_client),),
}


Action = Callable[[ModuleType], None]


class ImportHook(MetaPathFinder):
    """Calls an action with its module between `start` and `stop`: at once where it is loaded, else right after it is
    imported, before the importing statement goes on. It imports nothing itself."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = actions
        self._stopped = False

    def start(self) -> None:
        sys.meta_path.insert(0, self)
        for name, action in self._actions.items():
            module = sys.modules.get(name)
            if module is not None:
                action(module)

    def stop(self) -> None:
        self._stopped = True
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec as the other finders know it, whose loader calls the action when it has run."""
        action = self._actions.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._follow(spec.loader, name, action)
                return spec
        return None

    def _follow(self, loader: Loader, name: str, action: Action) -> None:
        """A loader is one spec's own, but those of archives; one that is only asked whether the module exists never runs."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name and not self._stopped:
                action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
