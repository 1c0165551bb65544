"""Tests here run CUDA kernels; without a GPU they are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.paged import forget_plans
from vllm_kda_plugin.kernels import loader


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def compile_fatbin(source: Path, fatbin: Path, arch: str) -> None:
    """Compile for one architecture, as setup.py does."""
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    subprocess.run(["nvcc", "-fatbin", "-std=c++17", "-O3", gencode, str(source), "-o", str(fatbin)], check=True)


@pytest.fixture(scope="session")
def fatbins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of fatbins for this GPU."""
    if not torch.cuda.is_available() or shutil.which("nvcc") is None:
        pytest.skip("needs an NVIDIA GPU and nvcc")
    major, minor = torch.cuda.get_device_capability()
    folder = tmp_path_factory.mktemp("fatbin")
    for name in loader.KERNELS:
        if loader.ONLY_ON.get(name, (major, minor)) != (major, minor):
            continue
        source = next(path for base in loader.SOURCES if (path := base / f"{name}.cu").exists())
        compile_fatbin(source, folder / f"{name}.fatbin", "90a" if major == 9 else f"{major}{minor}")
    return folder


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process: no kernel is loaded and no launch is planned."""
    monkeypatch.setattr(loader, "_loaded", {})
    forget_plans()
    yield
    forget_plans()


@pytest.fixture(params=["prebuilt", "runtime"])
def origin(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_loaded: None
) -> str:
    """Where kernels come from in this test: fatbins, or NVRTC. Nothing is loaded yet."""
    where: str = request.param
    monkeypatch.setattr(loader, "FATBINS", request.getfixturevalue("fatbins") if where == "prebuilt" else tmp_path)
    return where
