"""Loads the CUDA kernels in ``csrc/`` and launches them, through CuPy.

A kernel is data: the fatbin that ``setup.py`` made, if it has code for this GPU, else the same source compiled
at first use by NVRTC, which CuPy keeps on disk. Nothing links against torch or Python.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

_DEQUANTIZE = [f"{fp8}_{wide}" for fp8 in ("e4m3", "e5m2") for wide in ("float16", "bfloat16")]

KERNELS: dict[str, tuple[str, ...]] = {
    "gather_cached_kv": (
        *(
            f"gather_{source}_{vector}"
            for source in ("slots", "table")
            for vector in (
                *("16_1", "16_2", "16_4", "8_4", "4_4", "2_4", "1_4"),
                *(f"{name}_{loads}" for name in _DEQUANTIZE for loads in ("8_1", "8_4", "1_4")),
            )
        ),
        *(f"gather_{form}_{name}" for form in ("classic", "elements") for name in ("4", "2", "1", *_DEQUANTIZE)),
    ),
}
"""Every file in ``csrc/`` and its entry points, all loaded together."""

FATBINS = Path(__file__).parent / "fatbin"
SOURCES = (Path(__file__).parent / "csrc", Path(__file__).parents[2] / "csrc")
"""Where the sources are in an installed package, and in a checkout."""

_loaded: dict[tuple[int, str], Kernel] = {}
_lock = threading.Lock()


class KernelUnavailable(RuntimeError):
    """A kernel cannot be had on this machine; the message says why and what to do."""


class CuPyUnavailable(KernelUnavailable, ImportError):
    """CuPy is missing, or made for another CUDA than torch is."""


@dataclasses.dataclass(frozen=True)
class KernelStatus:
    """Where a kernel comes from on the current GPU."""

    name: str
    state: Literal["prebuilt", "runtime", "none"]
    """In the package's fatbin, compiled here at first use, or not available."""
    detail: str = ""
    """Why it is not prebuilt, or not available."""


class Kernel:
    """The entry points of one source file, loaded on one GPU. Any thread may launch them."""

    def __init__(self, device: int, functions: dict[str, Any], status: KernelStatus) -> None:
        from cupy_backends.cuda.api import driver, runtime

        self.status = status
        self.device = device
        self.driver, self.runtime = driver, runtime
        self._functions = functions  # CuPy's objects, which keep the module loaded

    def prepare(self, entry: str, blocks: int, threads: int, num_pointers: int, constants: Sequence[int]) -> Launch:
        """A launch of which all but the pointers is known.

        Args:
            entry: the name of one of the file's entry points.
            blocks: thread blocks in the (one-dimensional) grid.
            threads: threads in each block.
            num_pointers: pointers that the kernel's one argument begins with, a struct of 8-byte members.
            constants: the integers that follow them.
        """
        return Launch(self, self._functions[entry].ptr, blocks, threads, num_pointers, constants)


class Launch:
    """A kernel with its grid and constants; called with pointers. Any thread may call it."""

    def __init__(
        self, kernel: Kernel, handle: int, blocks: int, threads: int, num_pointers: int, constants: Sequence[int]
    ) -> None:
        import torch

        self._kernel = kernel
        self._device = kernel.device
        self._current_device = torch._C._cuda_getDevice
        self._current_stream = torch._C._cuda_getCurrentRawStream
        self._launch = kernel.driver.launchKernel
        self._shape = (handle, blocks, 1, 1, threads, 1, 1, 0)
        self._struct = ctypes.c_longlong * (num_pointers + len(constants))
        self._template = self._struct(*[0] * num_pointers, *constants)

    def __call__(self, *pointers: int) -> None:
        """Launch on torch's current stream of the kernel's GPU. Does not synchronise."""
        if self._current_device() != self._device:
            self._call_on_its_device(pointers)
            return
        if not self._kernel.driver.ctxGetCurrent():  # a thread that has not used this GPU yet
            self._kernel.runtime.setDevice(self._device)
        struct = self._struct.from_buffer_copy(self._template)  # one a call: other threads may be here too
        struct[: len(pointers)] = pointers  # type: ignore[call-overload]  # takes any sequence
        parameter = ctypes.c_void_p(ctypes.addressof(struct))
        stream = self._current_stream(self._device)
        # The driver copies the struct before it returns. This direct call takes half the time of a RawKernel's.
        self._launch(*self._shape, stream, ctypes.addressof(parameter), 0)

    def _call_on_its_device(self, pointers: tuple[int, ...]) -> None:
        import torch

        with torch.cuda.device(self._device):
            self(*pointers)


def load(name: str, device: int) -> Kernel:
    """The kernel ``csrc/{name}.cu`` on a GPU; loaded, and compiled if need be, by the first call.

    Args:
        name: a key of :data:`KERNELS`.
        device: index of the GPU, as torch counts.

    Raises:
        CuPyUnavailable: CuPy is missing or does not fit torch.
        KernelUnavailable: neither the fatbin nor the source can be loaded on this GPU.
        RuntimeError: the first call came while torch captures a CUDA graph, when nothing can be loaded.
    """
    kernel = _loaded.get((device, name))
    if kernel is not None:
        return kernel
    with _lock:
        if (device, name) not in _loaded:
            _loaded[device, name] = _load(name, device)
        return _loaded[device, name]


def kernel_status() -> list[KernelStatus]:
    """Where each kernel comes from on the current GPU; loads, and may compile, them. Never raises."""
    found = []
    for name in KERNELS:
        try:
            import torch

            # A build without CUDA has no current device; load() says so.
            device = torch.cuda.current_device() if torch.version.cuda and torch.cuda.is_available() else 0
            found.append(load(name, device).status)
        except Exception as error:  # torch, CuPy and drivers fail in many ways, and this is how people learn of it
            found.append(KernelStatus(name, "none", str(error) or type(error).__name__))
    return found


def check_cupy(cuda: str) -> None:
    """Raise :class:`CuPyUnavailable` unless the one CuPy installed is for this CUDA version, such as ``13.0``."""
    wanted = f"cupy-cuda{cuda.split('.')[0]}x"
    names = {(distribution.name or "").lower() for distribution in importlib.metadata.distributions()}
    installed = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\d+x)?", name))
    if installed in ([wanted], ["cupy"]):  # `cupy` was compiled here, for any CUDA: importing it will tell
        return
    if not installed:
        raise CuPyUnavailable(f"CuPy, which launches the CUDA kernels, is not installed; run: pip install {wanted}")
    raise CuPyUnavailable(
        f"{' and '.join(installed)} installed, but torch is built for CUDA {cuda} and needs {wanted} alone; "
        f"run: pip uninstall -y {' '.join(installed)} && pip install {wanted}"
    )


def _load(name: str, device: int) -> Kernel:
    import torch

    if torch.version.cuda is None:
        raise KernelUnavailable(f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch")
    if not torch.cuda.is_available():
        raise KernelUnavailable("torch finds no NVIDIA GPU; nvidia-smi tells whether the driver does")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"kernel {name} is not loaded on cuda:{device} and cannot be while a CUDA graph is captured; "
            f"call load({name!r}, {device}) before the capture"
        )
    check_cupy(torch.version.cuda)
    try:
        import cupy
    except ImportError as error:
        major = torch.version.cuda.split(".")[0]
        fix = f"pip install --force-reinstall cupy-cuda{major}x"
        raise CuPyUnavailable(f"CuPy is installed but fails to import ({error}); run: {fix}") from error

    with torch.cuda.device(device):
        cupy.cuda.runtime.setDevice(device)  # makes the context of a thread that has none
        source = _find_source(name)
        why_not_prebuilt = _why_not_fresh(name, source)
        if not why_not_prebuilt:
            try:
                module = cupy.RawModule(path=str(FATBINS / f"{name}.fatbin"))
                return Kernel(device, _functions(module, name), KernelStatus(name, "prebuilt"))
            except Exception as error:
                why_not_prebuilt = f"the fatbin does not load on this GPU ({error})"
        if source is None:
            raise KernelUnavailable(f"kernel {name}: {why_not_prebuilt}, and its source is missing; reinstall")
        try:
            module = cupy.RawModule(code=source.read_text(encoding="utf-8"), options=("-std=c++17",))
            return Kernel(device, _functions(module, name), KernelStatus(name, "runtime", why_not_prebuilt))
        except Exception as error:
            raise KernelUnavailable(f"kernel {name}: {why_not_prebuilt}, and compiling it failed: {error}") from error


def _find_source(name: str) -> Path | None:
    return next((path for folder in SOURCES if (path := folder / f"{name}.cu").exists()), None)


def _why_not_fresh(name: str, source: Path | None) -> str:
    """Why the fatbin must not be used, "" if it may be."""
    fatbin = FATBINS / f"{name}.fatbin"
    if not fatbin.exists():
        return "no fatbin was built"
    # In a checkout the source may have been edited since. A wheel's files are as old as each other, about.
    if source is not None and source.parent == SOURCES[1] and source.stat().st_mtime > fatbin.stat().st_mtime:
        return "the fatbin is older than its source"
    return ""


def _functions(module: Any, name: str) -> dict[str, Any]:
    return {entry: module.get_function(entry).kernel for entry in KERNELS[name]}
