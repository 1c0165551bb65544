"""Runs something right after a module of vLLM is imported, without importing it early."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the awaited modules as all other finders do, and adds the call to their loader."""

    def __init__(self, awaited: dict[str, Callable[[ModuleType], None]]) -> None:
        self.awaited = awaited
        self.of_thread = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.awaited or getattr(self.of_thread, "looks", False):
            return None
        self.of_thread.looks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.of_thread.looks = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            then, execute = self.awaited[fullname], loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                then(module)

            loader.exec_module = exec_module
        return spec


def after_import(calls: dict[str, Callable[[ModuleType], None]]) -> None:
    """Call each function with its module as soon as that is imported, at once if it is already.

    Args:
        calls: by full name of the module.
    """
    for name, then in calls.items():
        if name in sys.modules:
            then(sys.modules[name])
    sys.meta_path.insert(0, _Finder({name: then for name, then in calls.items() if name not in sys.modules}))
