"""Tests here run CUDA kernels; without a GPU they are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paged import forget_plans
from vllm_kda_plugin.kernels import loader


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _no_test_after_a_lost_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """After an error that a process keeps for good, such as a wrong address, other tests would only seem to fail.

    A worker of pytest-xdist (``-n 1``) ends then and another goes on; without one the session ends.
    """
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        request.session.shouldfail = f"the GPU is lost to this process: {str(error).splitlines()[0]}"


@pytest.fixture
def untuned_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels that vLLM has tuned run in the first of their ways.

    To find the fastest, those of KDA alone are compiled in some 80 ways for each number of heads.
    """
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    run = autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    monkeypatch.setattr(autotuner, "run", run_first)


def compile_fatbin(source: Path, fatbin: Path, arch: str, *options: str) -> None:
    """Compile for one architecture, as setup.py does, with options of nvcc besides."""
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = ["nvcc", "-fatbin", "-std=c++17", "-O3", gencode, *options, str(source), "-o", str(fatbin)]
    subprocess.run(command, check=True)


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
