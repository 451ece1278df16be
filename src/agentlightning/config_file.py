"""Settings from a TOML file, with dotted overrides, as the command line takes them.

What is read becomes a `Config`, which checks it. Paths become absolute where they exist, so that a run can be resumed from
anywhere. Knows nothing of what the settings do.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.config import Config, parse_config
from agentlightning.errors import ConfigError


def load_config(path: Path | None, overrides: Sequence[str] = (), given: Mapping[str, Any] | None = None) -> Config:
    """Read a TOML file, then apply settings `given` by dotted name and ``a.b=value`` overrides (TOML or plain text).

    Paths in the file that exist beside it are relative to it, all others to the working directory. Raises ConfigError.
    """
    table: dict[str, Any] = {}
    if path is not None:
        table = _read(path)
        _anchor(table, path.parent)
    for name, value in (given or {}).items():
        algorithm = table.get("algorithm")
        if name == "algorithm.name" and isinstance(algorithm, dict) and algorithm.get("name", "lightning_rl") != value:
            del table["algorithm"]  # what the file says is of another algorithm
        _set(table, name, value)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override}: expected table.setting=value")
        _set(table, name.strip(), _value(text))
    _anchor(table, Path.cwd())
    return parse_config(table, str(path) if path is not None else "settings")


def load_air_table(path: Path) -> dict[str, Any]:
    """The ``[air]`` table of a TOML file, unchecked; of its own rules, files beside it are found. Raises ConfigError."""
    table = _read(path)
    if not isinstance(table.get("air"), dict):
        raise ConfigError(f"{path}: expected a table [air]")
    _anchor(table, path.parent)
    return dict(table["air"])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as cause:
        raise ConfigError(f"{path}: no such file; give the path of a TOML file") from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path}: cannot be read: {cause}") from cause
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"{path}: not valid TOML: {cause}") from cause


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    parts = name.split(".")
    if not all(parts):
        raise ConfigError(f"{name!r}: expected the name of a setting, such as trainer.steps")
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: {part} is a setting, not a table")
    table[parts[-1]] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _anchor(table: dict[str, Any], folder: Path) -> None:
    """Make paths that exist under `folder` absolute, so that a run can be resumed from anywhere."""
    for section, names in (
        ("model", ("path",)),
        ("agent", ("run", "reward")),
        ("data", ("train", "val")),
    ):
        values = table.get(section)
        if isinstance(values, dict):
            _anchor_values(values, names, folder)
    agent = table.get("agent")
    rewards = agent.get("reward") if isinstance(agent, dict) else None
    for place, reward in enumerate(rewards) if isinstance(rewards, list) else [(0, rewards)]:
        if isinstance(reward, dict):
            _anchor_values(reward, ("run",), folder)
        elif isinstance(rewards, list):
            rewards[place] = _anchored(reward, folder)
    _anchor_algorithm(table.get("algorithm"), folder)
    air = table.get("air")
    rules = air.get("rules") if isinstance(air, dict) else None
    for rule in rules.values() if isinstance(rules, dict) else ():
        if isinstance(rule, dict):
            _anchor_values(rule, ("run",), folder)
    policies = table.get("policies")
    for policy in policies.values() if isinstance(policies, dict) else ():
        if isinstance(policy, dict):
            _anchor_values(policy, ("model",), folder)
            _anchor_algorithm(policy.get("algorithm"), folder)


def _anchor_algorithm(algorithm: Any, folder: Path) -> None:
    for values in (algorithm, algorithm.get("credit_settings") if isinstance(algorithm, dict) else None):
        if isinstance(values, dict):  # there, a plain word is the name of a rule and never a file
            _anchor_values(values, [name for name, value in values.items() if ".py:" in str(value)], folder)
    agents = algorithm.get("agents") if isinstance(algorithm, dict) else None
    if isinstance(agents, list):
        named = dict(enumerate(agents))
        _anchor_values(named, [place for place, agent in named.items() if ".py:" in str(agent)], folder)
        agents[:] = named.values()


def _anchor_values(values: dict[Any, Any], names: Sequence[Any], folder: Path) -> None:
    for name in names:
        if name in values:
            values[name] = _anchored(values[name], folder)


def _anchored(value: Any, folder: Path) -> Any:
    if not isinstance(value, str):
        return value
    file, separator, rest = value.partition(":") if ".py:" in value else (value, "", "")
    if Path(file).is_absolute() or not (folder / file).exists():
        return value
    return f"{(folder / file).resolve()}{separator}{rest}"
