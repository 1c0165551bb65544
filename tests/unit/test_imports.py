"""A function is called once, right after its module is imported, and never imports it."""

from __future__ import annotations

import importlib
import pathlib
import sys
from types import ModuleType

import pytest

from vllm_kda_plugin.platforms.imports import after_import


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a module ``late`` in it, and a clean slate afterwards."""
    folder = tmp_path / "awaited_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "late.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("awaited_package", "awaited_package.late"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "awaited_package.late"


def test_called_after_the_import(package: str) -> None:
    seen: list[int] = []

    def then(module: ModuleType) -> None:
        seen.append(module.value)

    after_import({package: then})
    assert package not in sys.modules
    assert seen == []
    importlib.import_module(package)
    importlib.import_module(package)
    assert seen == [3]


def test_called_at_once_if_imported_before(package: str) -> None:
    seen: list[ModuleType] = []
    module = importlib.import_module(package)
    after_import({package: seen.append})
    assert seen == [module]


def test_a_module_that_never_comes(package: str) -> None:
    after_import({"awaited_package.never": lambda module: pytest.fail("called")})
    with pytest.raises(ModuleNotFoundError, match=r"awaited_package\.never"):
        importlib.import_module("awaited_package.never")
    importlib.import_module(package)
