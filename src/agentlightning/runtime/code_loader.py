"""Loads code by its place, ``file.py:name`` or ``package.module:name``, and plug-ins by entry point, too.

Workers, the trainer, the learner and whoever makes engines use it; `runner.user_code` adds what only agents need. Whatever
is wrong becomes one sentence. Whoever reads a stored run wraps it in `only_named_code`: a record names code, and everybody
with a trainer's token writes records. Knows nothing of what the callables do.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from agentlightning.errors import AgentError, AgentLightningError, ConfigError
from agentlightning.runtime.disk import file_hash

PluginKind = Literal["algorithm", "credit", "advantage", "loss", "aggregation", "engine", "environment"]
GROUPS: dict[PluginKind, str] = {
    "algorithm": "agentlightning.algorithms",
    "credit": "agentlightning.credits",
    "advantage": "agentlightning.advantages",
    "loss": "agentlightning.losses",
    "aggregation": "agentlightning.aggregations",
    "engine": "agentlightning.engines",
    "environment": "agentlightning.environments",
}
"""Entry-point group of each kind of plug-in."""
SETTINGS: dict[PluginKind, str] = {kind: f"algorithm.{kind}" for kind in GROUPS} | {
    "algorithm": "algorithm.type",
    "engine": "engine.name",
    "environment": "env",
}
"""The setting that names each kind of plug-in."""
HASH = "__agl_sha256__"
"""Attribute of an imported module: the hash of its file, which may be edited while the process lives."""

_NAMED: ContextVar[frozenset[str] | None] = ContextVar("agl_named_code", default=None)
"""The code that may be loaded by its name; None: any."""


@contextmanager
def only_named_code(*named: str | None, trust_run: bool = False) -> Iterator[None]:
    """Loads no code in the block but what the user `named`, so that reading a run never imports what its record names;
    with `trust_run` everything."""
    token = _NAMED.set(None if trust_run else frozenset(one for one in named if one))
    try:
        yield
    finally:
        _NAMED.reset(token)


def check_named(spec: str, what: str) -> None:
    """ConfigError where `spec` may not be loaded here. Called wherever code is loaded by a name."""
    named = _NAMED.get()
    if named is not None and spec not in named:
        raise ConfigError(
            f"{what}: the run's record names the code {spec[:80]!r}, which is not imported to read it; if you trust whoever "
            "recorded the run, add --trust-run"
        )


def installed_plugins(kind: PluginKind) -> Mapping[str, EntryPoint]:
    """The entry points of a kind, by name."""
    return _scanned(GROUPS[kind], tuple(sys.path))


@lru_cache(maxsize=64)
def _scanned(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """The entry points of a group, found once for a `path`: a loss is looked up with every piece of a micro-batch, and
    a scan of all packages takes 30 ms."""
    return MappingProxyType({entry.name: entry for entry in entry_points(group=group)})


def load_plugin(kind: PluginKind, name: str, built_in: Collection[str]) -> Any:
    """The plug-in that ``file.py:name``, ``package.module:name`` or the name of an entry point names.

    ConfigError, with what was expected, where there is none; AgentError where importing it raises.
    """
    setting = SETTINGS[kind]
    if is_code(name):
        return load_code(name, setting)
    check_named(name, setting)
    installed = installed_plugins(kind)
    if name not in installed:
        known = ", ".join(sorted({*built_in, *installed}))
        raise ConfigError(f"{setting}: expected one of {known}, or file.py:name of your own, got {name!r}")
    with _importing(None, name, setting):
        return installed[name].load()


def plugin_hash(kind: PluginKind, name: str) -> str | None:
    """SHA-256 of the file that a plug-in is in, as this process imported it; None where its module has no file.

    Two processes of a run compare it: the file may have been edited between their imports.
    """
    load_plugin(kind, name, ())
    source = name.rpartition(":")[0] if is_code(name) else installed_plugins(kind)[name].module
    module = load_file(Path(source), kind) if source.endswith(".py") else sys.modules[source]
    return getattr(_with_hash(module), HASH, None)


def _with_hash(module: ModuleType) -> ModuleType:
    file = getattr(module, "__file__", None)
    if not hasattr(module, HASH) and file is not None and Path(file).is_file():
        setattr(module, HASH, file_hash(Path(file)))
    return module


def is_code(name: str) -> bool:
    """True where a colon separates a name: 'a.py:solve', 'C:/a.py:solve', 'pkg.mod:solve', not 'C:/a.py'."""
    return ":" in name and not name.endswith(".py")


def path_of_code(value: Any, setting: str) -> str:
    """The text that names a function or class of a file, so that another process finds it again."""
    name = getattr(value, "__qualname__", "<")
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    code = getattr(value, "__code__", None)
    file = getattr(module, "__file__", None) if code is None else code.co_filename
    if file is None or "<" in name or not str(file).endswith(".py"):
        raise ConfigError(
            f"{setting}: {getattr(value, '__name__', value)!r} cannot be found again by another process; put it at the top "
            "of a file and give file.py:name"
        )
    return f"{Path(file).resolve()}:{name}"


def load_code(spec: str, what: str) -> Any:
    """The value that `spec`, with a name after its colon, names."""
    check_named(spec, what)
    source, _, name = spec.rpartition(":")
    module = load_file(Path(source), what) if source.endswith(".py") else load_module(source, what)
    return value_of(module, name, spec, what)


def load_function(spec: str, parameters: tuple[str, ...], what: str) -> Callable[..., Any]:
    """The function ``file.py:name`` or ``package.module:name``, which takes these arguments by position.

    ConfigError where it does not exist or its signature does not fit; AgentError where importing it raises.
    """
    if not is_code(spec):
        raise ConfigError(f"{what} {spec!r}: expected file.py:name or package.module:name")
    value = load_code(spec, what)
    check_signature(value, parameters, f"{what} {spec!r}")
    return value  # type: ignore[no-any-return]


def check_signature(value: Any, parameters: tuple[str, ...], label: str, *, settings: bool = False) -> None:
    """ConfigError unless `value` can be called with these arguments by position; with `settings`, keyword-only arguments
    without a default are given by name."""
    wanted = f"({', '.join(parameters)})"
    if not callable(value):
        raise ConfigError(f"{label}: expected a callable {wanted}, got {type(value).__name__}")
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return  # builtins without a signature
    try:
        named = [one.name for one in signature.parameters.values() if settings and one.kind is one.KEYWORD_ONLY]
        signature.bind(*parameters, **dict.fromkeys(named))
    except TypeError as cause:
        raise ConfigError(f"{label}: expected to be callable as {wanted}, but its signature is {signature}") from cause


def load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{what} file {str(path)!r} does not exist (looked from {Path.cwd()})")
    path = path.resolve()
    root, dotted = _package_of(path)
    with _importing(root, str(path), what):
        if "." in dotted:
            return _with_hash(importlib.import_module(dotted))
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
        return _with_hash(module)


def load_module(name: str, what: str) -> ModuleType:
    with _importing(Path.cwd(), name, what):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as cause:
            if cause.name is not None and (name == cause.name or name.startswith(f"{cause.name}.")):
                raise ConfigError(
                    f"{what} module {name!r} does not exist; expected file.py:name or package.module:name"
                ) from cause
            raise


def module_file(name: str) -> Path | None:
    """The file that importing the module would run, found without importing anything; None where there is none."""
    file, places, above = None, [*sys.path, str(Path.cwd())], ""
    for part in name.split("."):
        above = f"{above}.{part}" if above else part
        found = PathFinder.find_spec(above, places) if places else None
        if found is None:
            return None
        file, places = found.origin, list(found.submodule_search_locations or ())
    return Path(file).resolve() if file and Path(file).is_file() else None


def _package_of(path: Path) -> tuple[Path, str]:
    """The folder that must be on sys.path, and the dotted name from there: a file of a package keeps its package."""
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


@contextmanager
def _importing(root: Path | None, source: str, what: str) -> Iterator[None]:
    """Import with `root` last on sys.path, where it stays: the code finds its neighbours, also later, and a neighbour called
    like a library (random.py) does not hide it."""
    if root is not None and str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        yield
    except (AgentLightningError, KeyboardInterrupt):
        raise
    except BaseException as cause:
        hidden = "" if root is None else _hidden_neighbour(root, cause)
        raise AgentError(f"{what} {source!r} cannot be imported: {place_of(cause)}{hidden}") from cause


def _hidden_neighbour(root: Path, error: BaseException) -> str:
    """Names the file of `root` that a library of its name hid from an import; '' where none did."""
    name = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ImportError) else ""
    file = getattr(sys.modules.get(name), "__file__", None)
    beside = [path for path in (root / f"{name}.py", root / name / "__init__.py") if path.is_file()]
    if not name or not beside or (file is not None and Path(file).is_relative_to(root)):
        return ""
    return f" ({beside[0]} is hidden by the module {name!r}{f' of {file}' if file else ''}: rename it)"


def place_of(error: BaseException) -> str:
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


def value_of(module: ModuleType, name: str, spec: str, what: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise ConfigError(f"{what} {spec!r}: there is no {name!r}; there are {callables_of(module)}") from None


def callables_of(module: ModuleType) -> str:
    public = {name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    own = [name for name, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    return ", ".join(sorted(own or public)) or "no public callables"
