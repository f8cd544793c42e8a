"""Modules that are imported when something of theirs is first used, for packages that ask for more than they need.

A deferred module is the real one, in its place in `sys.modules`, only not executed yet: whatever asks it for a name has
it executed first, so nothing can tell the difference but the clock. `importlib.util.LazyLoader` will not do: in Python
3.11 the second `import` of its module executes it. Which packages are worth it is left to `components.validation.tfdv`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def deferring(*, modules: Collection[str], packages: Collection[str]) -> Iterator[None]:
    """While it lasts, `modules` are imported unexecuted, and `packages` without what their `__init__` imports.

    Of a package, a name that its `__init__` takes from a submodule is taken when asked for. This holds only for an
    `__init__` of nothing but `from module import name`; any other is executed as usual. What is imported already stays.
    """
    finder = _Finder(modules, packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """While it lasts, the modules `names` that were not imported yet cannot be, as if they were not installed."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # what Python documents as "cannot be imported"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Drops what is said at import and concerns nobody here; an import that fails still says why.

    Beam warns through the root logger (crcmod), Google's packages by FutureWarning (Python's age), TFDV by print
    (IPython).
    """
    disabled, handlers = logging.root.manager.disable, list(logging.root.handlers)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        # A root logger without handlers gave itself one at its first warning, on the stream that is gone now.
        logging.root.handlers[:] = handlers


def is_deferred(name: str) -> bool:
    """Whether the module `name` was imported and not executed yet."""
    return isinstance(getattr(sys.modules.get(name), "__loader__", None), _Deferred)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: Collection[str], packages: Collection[str]) -> None:
        self._loaders = {**dict.fromkeys(modules, _Deferred), **dict.fromkeys(packages, _ByName)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._loaders:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = self._loaders[fullname](spec.loader)
        return spec


class _Deferred(importlib.abc.Loader):
    """Executes a module when a name is asked of it that it does not have."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._lock = threading.RLock()
        self._path: Any = None
        self._executing = False

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # Without its path, the import of a submodule asks for it, which executes the package first, as it must be.
        self._path = vars(module).pop("__path__", None)

        def find(name: str) -> Any:
            with self._lock:
                if self._executing:  # the module asks itself for what it does not have
                    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
                if module.__loader__ is self:
                    self._execute(module, find)
            return getattr(module, name)

        module.__getattr__ = find  # type: ignore[method-assign]

    def _execute(self, module: ModuleType, find: Callable[[str], Any]) -> None:
        if self._path is not None:
            module.__path__ = self._path
        self._executing = True
        try:
            self._loader.exec_module(module)
        except BaseException:
            vars(module).pop("__path__", None)
            raise
        finally:
            self._executing = False
        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        if vars(module).get("__getattr__") is find:  # not one that the module brought
            del module.__getattr__


class _ByName(importlib.abc.Loader):
    """Takes a package's names from its submodules one by one, when they are asked for."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__:
            module.__spec__.loader = self._loader
        origins = _origins(self._loader.get_source(module.__name__))
        if origins is None:
            self._loader.exec_module(module)
            return

        def find(name: str) -> Any:
            if name not in origins:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            submodule, original = origins[name]
            value = getattr(importlib.import_module(submodule), original)
            setattr(module, name, value)
            return value

        module.__getattr__ = find  # type: ignore[method-assign]


def _origins(source: str | None) -> dict[str, tuple[str, str]] | None:
    """Module and name behind each name that the source imports; None if it does anything else."""
    origins: dict[str, tuple[str, str]] = {}
    for statement in ast.parse(source).body if source else ():
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if not isinstance(statement, ast.ImportFrom) or statement.level or not statement.module:
            return None
        origins |= {alias.asname or alias.name: (statement.module, alias.name) for alias in statement.names}
    return origins if origins and "*" not in origins else None
