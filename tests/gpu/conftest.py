"""Tests here run CUDA kernels; without a GPU they are skipped."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from vllm_kda_plugin.kernels import loader


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def build_fatbins(folder: Path, arch: str) -> Path:
    """Compile every kernel for one architecture into ``folder``, as setup.py does."""
    for name in loader.KERNELS:
        source = next(path for base in loader.SOURCES if (path := base / f"{name}.cu").exists())
        target = folder / f"{name}.fatbin"
        gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        subprocess.run(["nvcc", "-fatbin", "-std=c++17", "-O3", gencode, str(source), "-o", str(target)], check=True)
    return folder


@pytest.fixture(scope="session")
def fatbins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of fatbins for this GPU."""
    if not torch.cuda.is_available() or shutil.which("nvcc") is None:
        pytest.skip("needs an NVIDIA GPU and nvcc")
    major, minor = torch.cuda.get_device_capability()
    return build_fatbins(tmp_path_factory.mktemp("fatbin"), "90a" if major == 9 else f"{major}{minor}")


@pytest.fixture(params=["prebuilt", "runtime"])
def origin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where kernels come from in this test: fatbins, or NVRTC. Nothing is loaded yet."""
    where: str = request.param
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "FATBINS", request.getfixturevalue("fatbins") if where == "prebuilt" else tmp_path)
    return where
