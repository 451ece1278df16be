"""manifests: one template for each Kubernetes object, rendered as a template of a Helm chart or as a plain object.

What differs are the values: a chart has expressions where the plain object has the chart's default values. Driven by
`render`. The names here are what templates call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Caller = Callable[..., str]


class Pool(Protocol):
    """One pool of workers, as a template sees it."""

    def __call__(self, name: str) -> str:
        """A plain value of the pool."""

    def block(self, name: str) -> str:
        """A list or a table of the pool, on one line."""

    def labels(self) -> str:
        """Its labels as arguments of `agl worker`."""


class ChartValues:
    """Values as expressions of Helm."""

    def v(self, path: str) -> str:
        """A plain value."""
        return f"{{{{ $.Values.{path} }}}}"

    def block(self, path: str) -> str:
        """A list or a table, on one line: JSON is YAML."""
        return f"{{{{ toJson $.Values.{path} }}}}"

    def when(self, path: str, expected: str | None = None, *, caller: Caller) -> str:
        """The body, where the value is true, or the expected one."""
        condition = f"$.Values.{path}" if expected is None else f"eq $.Values.{path} {json.dumps(expected)}"
        return f"{{{{- if {condition} }}}}\n{caller()}{{{{- end }}}}\n"

    def each(self, path: str, *, caller: Caller) -> str:
        """The body for each entry of a list."""
        return f"{{{{- range $pool := $.Values.{path} }}}}\n{caller(ChartPool())}{{{{- end }}}}\n"

    def dashboard_text(self) -> str:
        """The dashboard as a text in YAML; its own braces are no expressions in a file of the chart."""
        return '{{ .Files.Get "files/dashboard.json" | toJson }}'


class ChartPool:
    """The pool of a range over them."""

    def __call__(self, name: str) -> str:
        return f"{{{{ $pool.{name} }}}}"

    def block(self, name: str) -> str:
        return f"{{{{ toJson $pool.{name} }}}}"

    def labels(self) -> str:
        each = '{{ if $number }}, {{ end }}"--label", {{ $label | quote }}'
        return f"[{{{{- range $number, $label := $pool.labels }}}}{each}{{{{- end }}}}]"


class PlainValues:
    """The values themselves."""

    def __init__(self, values: Mapping[str, Any], dashboard: str) -> None:
        """dashboard: as a text of YAML."""
        self._values = values
        self._dashboard = dashboard

    def v(self, path: str) -> str:
        """A plain value."""
        return str(self._at(path))

    def block(self, path: str) -> str:
        """A list or a table, on one line: JSON is YAML."""
        return json.dumps(self._at(path))

    def when(self, path: str, expected: str | None = None, *, caller: Caller) -> str:
        """The body, where the value is true, or the expected one."""
        value = self._at(path)
        return caller() if (value if expected is None else value == expected) else ""

    def each(self, path: str, *, caller: Caller) -> str:
        """The body for each entry of a list."""
        return "".join(caller(PlainPool(pool)) for pool in self._at(path))

    def dashboard_text(self) -> str:
        """The dashboard as a text in YAML."""
        return self._dashboard

    def _at(self, path: str) -> Any:
        value: Any = self._values
        for name in path.split("."):
            value = value[name]
        return value


class PlainPool:
    """One pool of the values."""

    def __init__(self, pool: Mapping[str, Any]) -> None:
        self._pool = pool

    def __call__(self, name: str) -> str:
        return str(self._pool[name])

    def block(self, name: str) -> str:
        return json.dumps(self._pool[name])

    def labels(self) -> str:
        return json.dumps([word for label in self._pool["labels"] for word in ("--label", label)])
