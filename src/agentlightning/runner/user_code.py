"""Loads user code in a worker process: ``file.py:name``, ``package.module:name``, or a ``.pkl`` written by cloudpickle.

`agent_spec` turns a callable into such a text where a trainer starts, `load` turns it back in a worker. Whatever is wrong
becomes one sentence. Knows nothing of what the callables do.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from agentlightning.errors import AgentError, AgentLightningError, ConfigError
from agentlightning.runner.agent import is_marked


def load(spec: str, parameters: tuple[str, ...] | None = ("task", "llm"), what: str = "agent") -> Callable[..., Any]:
    """The callable that `spec` names, checked to accept `parameters` by position (None: not checked).

    ConfigError where the file, the module or the name does not exist or the signature does not fit; AgentError where
    importing it raises. Both name the spec and what was expected.
    """
    if spec.endswith(".pkl"):
        value = _unpickle(Path(spec), what)
    else:
        source, _, name = spec.rpartition(":") if _has_name(spec) else (spec, "", "")
        module = _load_file(Path(source), what) if source.endswith(".py") else _load_module(source, what)
        value = _named(module, name, spec, what) if name else _marked(module, spec, what)
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
    except Exception as cause:  # pickling runs the __reduce__ of whatever the function refers to
        raise ConfigError(
            f"agent {name or function!r} cannot be sent to workers: {cause}; "
            "put it in a module of its own (file.py:name) or build that object inside the function"
        ) from cause
    folder.mkdir(parents=True, exist_ok=True)
    label = "".join(letter if letter.isalnum() else "_" for letter in name) or "agent"
    path = (folder / f"{label}-{hashlib.sha256(body).hexdigest()[:12]}.pkl").resolve()
    path.write_bytes(pickle.dumps({"path": [entry for entry in sys.path if entry], "body": body}))
    return str(path)


def check_signature(value: Any, parameters: tuple[str, ...], label: str) -> None:
    """ConfigError unless `value` can be called with these arguments by position."""
    wanted = f"({', '.join(parameters)})"
    if not callable(value):
        raise ConfigError(f"{label}: expected a callable {wanted}, got {type(value).__name__}")
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return  # builtins without a signature
    try:
        signature.bind(*parameters)
    except TypeError as cause:
        raise ConfigError(f"{label}: expected to be callable as {wanted}, but its signature is {signature}") from cause


def _has_name(spec: str) -> bool:
    """Returns whether a colon separates a name: 'a.py:solve', 'C:/a.py:solve', 'pkg.mod:solve', not 'C:/a.py'."""
    return ":" in spec and not spec.endswith(".py")


def _load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what} file {str(path)!r} does not exist (looked from {Path.cwd()})")
    path = path.resolve()
    root, dotted = _package_of(path)
    with _importing(root, str(path), what):
        if "." in dotted:
            return importlib.import_module(dotted)
        name = f"agl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
        module_spec = importlib.util.spec_from_file_location(name, path)
        if module_spec is None or module_spec.loader is None:
            raise ConfigError(f"{what} file {str(path)!r} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module
        try:
            module_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _load_module(name: str, what: str) -> ModuleType:
    with _importing(Path.cwd(), name, what):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as cause:
            if cause.name is not None and (name == cause.name or name.startswith(f"{cause.name}.")):
                raise ConfigError(
                    f"{what} module {name!r} does not exist; expected file.py:name or package.module:name"
                ) from cause
            raise


def _package_of(path: Path) -> tuple[Path, str]:
    """The folder that must be on sys.path, and the dotted name from there: a file of a package keeps its package."""
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


@contextmanager
def _importing(root: Path, source: str, what: str) -> Iterator[None]:
    """Import with `root` first on sys.path; afterwards it is last: late imports of the agent still find its neighbours,
    and a neighbour called like a library no longer hides it."""
    entry = str(root)
    known = entry in sys.path
    sys.path.insert(0, entry)
    try:
        yield
    except AgentLightningError:
        raise
    except (Exception, SystemExit) as cause:
        raise AgentError(f"{what} {source!r} cannot be imported: {_where(cause)}") from cause
    finally:
        sys.path.remove(entry)
        if not known:
            sys.path.append(entry)


def _where(error: BaseException) -> str:
    """Describes what was raised and the last line of user code that led to it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen") and "importlib" not in frame.filename
    ]
    return f"{text} at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else text


def _named(module: ModuleType, name: str, spec: str, what: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise ConfigError(f"{what} {spec!r}: there is no {name!r}; there are {_callables(module)}") from None


def _callables(module: ModuleType) -> str:
    public = [known for known, value in vars(module).items() if not known.startswith("_") and callable(value)]
    return ", ".join(sorted(public)) or "no public callables"


def _marked(module: ModuleType, spec: str, what: str) -> Any:
    marked = {name: value for name, value in vars(module).items() if is_marked(value)}
    if len(marked) == 1:
        return next(iter(marked.values()))
    if what != "agent":
        raise ConfigError(f"{what} {spec!r}: add a name, as in {spec}:NAME; there are {_callables(module)}")
    found = f"{len(marked)} functions ({', '.join(sorted(marked))}) are" if marked else "no function is"
    raise ConfigError(f"{what} {spec!r}: add a name, as in {spec}:solve ({found} marked with @rollout)")


def _unpickle(path: Path, what: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{what} file {str(path)!r} does not exist (looked from {Path.cwd()})")
    try:
        stored = pickle.loads(path.read_bytes())
        sys.path.extend(entry for entry in stored["path"] if entry not in sys.path)
        return pickle.loads(stored["body"])
    except (Exception, SystemExit) as cause:  # unpickling imports the modules that the callable refers to
        raise AgentError(f"{what} {str(path)!r} cannot be loaded: {_where(cause)}") from cause
