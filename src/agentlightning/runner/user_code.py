"""Loads user code in a worker process: ``file.py:name``, ``package.module:name``, ``env:NAME`` for an
environment, or a ``.pkl`` written by cloudpickle.

`agent_spec` turns a callable into such a text where a trainer starts, `load` turns it back in a worker. Whatever is wrong
becomes one sentence. Knows nothing of what the callables do.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from agentlightning.config.agent import ENVIRONMENT
from agentlightning.errors import AgentError, ConfigError
from agentlightning.runner.agent import is_marked
from agentlightning.runtime.code_loader import (
    callables_of,
    check_named,
    check_signature,
    is_code,
    load_file,
    load_module,
    place_of,
    value_of,
)
from agentlightning.runtime.disk import make_private_folder, open_private

ENVIRONMENT_AGENT = "agentlightning.environments.agent"


def load(spec: str, parameters: tuple[str, ...] | None = ("task", "llm"), what: str = "agent") -> Callable[..., Any]:
    """The callable that `spec` names, checked to accept `parameters` by position (None: not checked).

    ConfigError where the file, the module or the name does not exist or the signature does not fit; AgentError where
    importing it raises. Both name the spec and what was expected.
    """
    check_named(spec, what)
    if spec.startswith(ENVIRONMENT):  # loaded by name, since environments are made of what stands here
        return load_module(ENVIRONMENT_AGENT, what).EnvironmentAgent(spec.removeprefix(ENVIRONMENT))  # type: ignore[no-any-return]
    if spec.endswith(".pkl"):
        value = _unpickle(Path(spec), what)
    else:
        source, _, name = spec.rpartition(":") if is_code(spec) else (spec, "", "")
        module = load_file(Path(source), what) if source.endswith(".py") else load_module(source, what)
        value = value_of(module, name, spec, what) if name else _marked(module, spec, what)
    if parameters is not None:
        check_signature(value, parameters, f"{what} {spec!r}")
    return value  # type: ignore[no-any-return]


def agent_spec(function: Callable[..., Any], folder: Path) -> str:
    """A text that `load` turns back into `function` in another process.

    A function of an importable module becomes ``file.py:name``; one of ``__main__``, a notebook or a closure is written to
    `folder` by cloudpickle. ConfigError where it can do neither.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if module is not None and module.__name__ != "__main__" and file and file.endswith(".py"):
        try:
            if attrgetter(name)(module) is function:
                return f"{Path(file).resolve()}:{name}"
        except AttributeError:
            pass  # a closure or a renamed function: it travels by value
    try:
        body = cloudpickle.dumps(function)
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # pickling runs the __reduce__ of whatever the function refers to
        raise ConfigError(
            f"agent {name or function!r} cannot be sent to workers: {cause}; "
            "put it in a module of its own (file.py:name) or build that object inside the function"
        ) from cause
    make_private_folder(folder)
    label = "".join(letter if letter.isalnum() else "_" for letter in name) or "agent"
    path = (folder / f"{label}-{hashlib.sha256(body).hexdigest()[:12]}.pkl").resolve()
    with open_private(path, "wb") as file:
        file.write(pickle.dumps({"path": [entry for entry in sys.path if entry], "body": body}))
    return str(path)


def _marked(module: ModuleType, spec: str, what: str) -> Any:
    marked = {name: value for name, value in vars(module).items() if is_marked(value)}
    if len(marked) == 1:
        return next(iter(marked.values()))
    if what != "agent":
        raise ConfigError(f"{what} {spec!r}: add a name, as in {spec}:NAME; there are {callables_of(module)}")
    found = f"{len(marked)} functions ({', '.join(sorted(marked))}) are" if marked else "no function is"
    raise ConfigError(f"{what} {spec!r}: add a name, as in {spec}:solve ({found} marked with @rollout)")


def _unpickle(path: Path, what: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{what} file {str(path)!r} does not exist (looked from {Path.cwd()})")
    try:
        stored = pickle.loads(path.read_bytes())
        sys.path.extend(entry for entry in stored["path"] if entry not in sys.path)
        return pickle.loads(stored["body"])
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # unpickling imports the modules that the callable refers to
        raise AgentError(f"{what} {str(path)!r} cannot be loaded: {place_of(cause)}") from cause
