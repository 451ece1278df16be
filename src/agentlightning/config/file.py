"""Settings from a TOML file, with dotted overrides, as the command line takes them.

What is read becomes a `Config`, which checks it. Paths become absolute where they exist, so that a run can be resumed from
anywhere. Knows nothing of what the settings do.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.config.agent import ENVIRONMENT
from agentlightning.config.run import Config, parse_config
from agentlightning.errors import ConfigError
from agentlightning.runtime.code_loader import SETTINGS, installed_plugins, module_file

PATHS = re.compile(
    r"/(model/path|env/name|agent/(run|reward(/\d+)?(/run)?)|data/(train|val)|air/rules/[^/]+/run|policies/[^/]+/model)"
)
CODE = re.compile(
    r"(/policies/[^/]+)?(/engine/name|/optimize/model|/algorithm(/schedule/\d+)?/([^/]+(/[^/]+)?|agents/\d+))"
)
"""Settings that may name code, ``file.py:name``; there, a plain word is the name of a rule and never a file."""


def load_config(path: Path | None, overrides: Sequence[str] = (), given: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML file, then apply settings `given` by dotted name and ``a.b=value`` overrides (TOML or plain text).

    Paths in the file that exist beside it are relative to it, all others to the working directory. Raises ConfigError.
    """
    table: dict[str, Any] = {}
    if path is not None:
        table = _anchored(read_toml(path), path.parent)
    for name, value in (given or {}).items():
        algorithm = table.get("algorithm")
        if name == "algorithm.type" and isinstance(algorithm, dict) and algorithm.get("type", "lightning_rl") != value:
            del table["algorithm"]  # what the file says is of another algorithm
        set_setting(table, name, value)
    for override in overrides:
        set_setting(table, *setting_of(override))
    return parse_config(_anchored(table, Path.cwd()), str(path) if path is not None else "settings")


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with ``a.b=value`` overrides. Raises ConfigError."""
    table = config.model_dump(mode="json")
    for override in overrides:
        set_setting(table, *setting_of(override))
    return parse_config(table, "settings")


def named_files(config: Config) -> dict[str, Path]:
    """The files that settings name, by dotted name: tasks and code, also modules and plug-ins. Imports nothing."""

    def walk(value: Any, name: str) -> Iterator[tuple[str, Path]]:
        if isinstance(value, dict | list):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(one, f"{name}/{key}")
        elif isinstance(value, str):
            file, module = _file_in(name, value), _module_in(name, value)
            path = None if file is None else Path(file[0])
            if module is not None and (path is None or not path.is_file()):
                path = module_file(module)
            if path is not None and path.is_file():
                yield name[1:].replace("/", "."), path.resolve()

    return dict(walk(config.model_dump(mode="json"), ""))


def _module_in(name: str, value: str) -> str | None:
    """The module of ``package.module:name``, or of an installed plug-in, where `name` is a setting that may name code."""
    if value.startswith(ENVIRONMENT):
        return None
    if ":" in value and (CODE.fullmatch(name) or PATHS.fullmatch(name)):
        return value.partition(":")[0]
    if not CODE.fullmatch(name):
        return None
    table = "engine" if "/engine/" in name else "algorithm"
    *_, above, last = name.split("/")
    setting = above if last == "type" and above != table and not above.isdigit() else last
    kinds = [kind for kind, known in SETTINGS.items() if known == f"{table}.{setting}"]
    entry = installed_plugins(kinds[0]).get(value) if kinds else None
    return None if entry is None or entry.module.startswith("agentlightning.") else entry.module


def read_toml(path: Path) -> dict[str, Any]:
    """The table that a TOML file is. ConfigError, naming the file, where it is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as cause:
        raise ConfigError(f"{path}: no such file; give the path of a TOML file") from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path}: cannot be read: {cause}") from cause
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"{path}: not valid TOML: {cause}") from cause


def set_setting(table: dict[str, Any], name: str, value: Any) -> None:
    """Sets a setting by its dotted name. ConfigError where the name is none."""
    parts = name.split(".")
    if not all(parts):
        raise ConfigError(f"{name!r}: expected the name of a setting, such as trainer.steps")
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if isinstance(inner, str):  # a choice by its bare name
            inner = table[part] = {"type": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: {part} is a setting, not a table")
        table = inner
    table[parts[-1]] = value


def setting_of(text: str, option: str = "--set") -> tuple[str, Any]:
    """Name and value of ``name=value``, the value as TOML, else as text. ConfigError that names the option otherwise."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{option} {text}: expected table.setting=value")
    return name.strip(), _value(value)


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):  # brackets by the thousand
        return text


def _anchored(value: Any, folder: Path, name: str = "") -> Any:
    """The value of the setting `name` (its keys joined by "/") with paths that exist under `folder` made absolute, so that a
    run can be resumed from anywhere."""
    if isinstance(value, dict):
        return {key: _anchored(one, folder, f"{name}/{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [_anchored(one, folder, f"{name}/{place}") for place, one in enumerate(value)]
    if not isinstance(value, str) or not (found := _file_in(name, value)):
        return value
    file, separator, rest = found
    if Path(file).is_absolute() or not (folder / file).exists():
        return value
    return f"{(folder / file).resolve()}{separator}{rest}"


def _file_in(name: str, value: str) -> tuple[str, str, str] | None:
    """The file that the setting `name` names, a colon and what follows it; None where it names none."""
    if not (PATHS.fullmatch(name) or (CODE.fullmatch(name) and ".py:" in value)):
        return None
    return value.partition(":") if ".py:" in value else (value, "", "")
