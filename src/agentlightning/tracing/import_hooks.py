"""Actions on a module as soon as it is imported, without importing it for that.

An agent that never loads a library pays nothing for what is done to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class ImportHook(MetaPathFinder):
    """Calls an action with its module between `start` and `stop`: at once where it is loaded, else right after it is
    imported, before the importing statement goes on."""

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
