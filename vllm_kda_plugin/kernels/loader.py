"""Loads the CUDA kernels in ``csrc/`` and launches them, through CuPy.

A kernel is data: the fatbin that ``setup.py`` made, if it has code for this GPU, else the same source compiled
at first use by NVRTC, which CuPy keeps on disk. Nothing links against torch or Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

_DEQUANTIZE = [f"{fp8}_{wide}" for fp8 in ("e4m3", "e5m2") for wide in ("float16", "bfloat16")]
_PAGED = (
    "dense_16_2",
    "wide_16_2",
    *(f"narrow_{vector}_4" for vector in (16, 8, 4, 2, 1)),
    *(f"{shape}_4" for name in _DEQUANTIZE for shape in (f"wide_{name}_8", f"narrow_{name}_8", f"narrow_{name}_1")),
)

KERNELS: dict[str, tuple[str, ...]] = {
    "gather_cached_kv": (
        *(f"gather_{source}_{shape}" for source in ("slots", "table") for shape in _PAGED),
        *("gather_table_dense_16_4", "gather_table_wide_16_4"),
        *(f"gather_{form}_{name}" for form in ("classic", "elements") for name in ("4", "2", "1", *_DEQUANTIZE)),
    ),
    "kda_states": ("gather_states", "scatter_states"),
    "kda_prefill_sm90": (
        *(f"kda_prefill_{gate}_{values}" for gate in ("bounded", "softplus") for values in (128, 64)),
        *("kda_segments_bounded", "kda_segments_softplus", "kda_combine"),
    ),
}
"""Every file in ``csrc/`` and its entry points, all loaded together."""

ONLY_ON = {"kda_prefill_sm90": (9, 0)}
"""Compute capability of the only GPUs that a kernel is for, where it is for some only."""

FATBINS = Path(__file__).parent / "fatbin"
SOURCES = (Path(__file__).parent / "csrc", Path(__file__).parents[2] / "csrc")
"""Where the sources are in an installed package, and in a checkout."""

_loaded: dict[tuple[int, str], Kernel] = {}
_lock = threading.Lock()


class KernelUnavailable(RuntimeError):
    """A kernel cannot be had on this machine; the message says why and what to do."""


class OtherGpu(KernelUnavailable):
    """A kernel is for GPUs of another kind than this one."""


class CuPyUnavailable(KernelUnavailable, ImportError):
    """CuPy is missing, or made for another CUDA than torch is."""


@dataclasses.dataclass(frozen=True)
class KernelStatus:
    """Where a kernel comes from on the current GPU."""

    name: str
    state: Literal["prebuilt", "runtime", "other", "none"]
    """In the package's fatbin, compiled here at first use, for other GPUs than this one, or not available."""
    detail: str = ""
    """Why it is not prebuilt, for which GPUs it is, or why it is not available."""


class Kernel:
    """The entry points of one source file, loaded on one GPU. Any thread may launch them."""

    def __init__(self, device: int, functions: dict[str, Any], status: KernelStatus) -> None:
        import torch

        self.status = status
        self.device = device
        self._functions = functions  # CuPy's objects, which keep the module loaded
        self._can_come_early = torch.cuda.get_device_capability(device)[0] >= 9

    def prepare(
        self,
        entry: str,
        blocks: int,
        threads: int,
        num_pointers: int,
        constants: Sequence[int],
        *,
        comes_early: bool = False,
        shared_bytes: int = 0,
    ) -> Launch:
        """A launch of which all but the pointers is known.

        Args:
            entry: the name of one of the file's entry points.
            blocks: thread blocks in the (one-dimensional) grid.
            threads: threads in each block.
            num_pointers: pointers that the kernel's one argument begins with, a struct of 8-byte members.
            constants: the integers that follow them.
            comes_early: let it be launched while the kernel before it in the stream ends, where the GPU can, Hopper
                and later. It must wait for that kernel before it touches memory.
            shared_bytes: of dynamic shared memory for each block.

        Raises:
            ValueError: more thread blocks than a grid can have.
            KernelUnavailable: a block cannot have so much shared memory.
        """
        if blocks >= 1 << 31:
            raise ValueError(f"{entry} would need {blocks:,} thread blocks, of which a grid has at most {2**31 - 1:,}")
        early, handle = comes_early and self._can_come_early, self._functions[entry].ptr
        if shared_bytes > _SHARED_BYTES:
            error = _cuda_driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
            if error:
                raise KernelUnavailable(
                    f"{entry} needs {shared_bytes:,} bytes of shared memory a block, which the driver refuses ({error})"
                )
        return Launch(self.device, self, handle, blocks, threads, num_pointers, constants, early, shared_bytes)


class _Config(ctypes.Structure):
    """CUlaunchConfig of the CUDA driver."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the CUDA driver."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


_SHARED_BYTES = 48 << 10  # that any block may have
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CHECK_BYTES = hashlib.sha256().digest_size
_COMES_EARLY = _Attribute(id=6, value=(ctypes.c_int * 16)(1))  # programmatic stream serialization: allowed


class Launch:
    """A kernel with its grid and constants, called with pointers. Any thread may call it."""

    def __init__(
        self,
        device: int,
        owner: object,
        handle: int,
        blocks: int,
        threads: int,
        num_pointers: int,
        constants: Sequence[int],
        comes_early: bool,
        shared_bytes: int,
    ) -> None:
        self._device, self._handle = device, handle
        self._owner = owner  # of the handle
        attributes = ctypes.addressof(_COMES_EARLY) if comes_early else None
        self._config = _Config(blocks, 1, 1, threads, 1, 1, shared_bytes, None, attributes, int(comes_early))
        self._struct = (ctypes.c_longlong * (num_pointers + len(constants)))(*[0] * num_pointers, *constants)
        self._num_pointers = num_pointers
        self._threads = threading.local()

    def __call__(self, *pointers: int) -> None:
        """Launch on torch's current stream of the kernel's GPU. Does not synchronise."""
        self.of_this_thread()(*pointers)

    def of_this_thread(self) -> Callable[..., None]:
        """The same for the current thread alone, half a microsecond faster to call."""
        try:
            launch: Callable[..., None] = self._threads.launch
        except AttributeError:
            launch = self._threads.launch = self._bind()
        return launch

    def _bind(self) -> Callable[..., None]:
        import torch
        from cupy_backends.cuda.api import driver, runtime

        device, handle = self._device, self._handle
        if (
            torch._C._cuda_getDevice() == device and not driver.ctxGetCurrent()
        ):  # a thread that has not used this GPU yet
            runtime.setDevice(device)
        config, struct = _Config.from_buffer_copy(self._config), type(self._struct).from_buffer_copy(self._struct)
        first = slice(self._num_pointers)
        parameters = ctypes.c_void_p(ctypes.addressof(struct))
        config_at, parameters_at = ctypes.addressof(config), ctypes.addressof(parameters)
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        cu_launch = _cuda_driver().cuLaunchKernelEx

        def launch(*pointers: int) -> None:
            if current_device() != device:
                with torch.cuda.device(device):
                    launch(*pointers)
                return
            struct[first] = pointers  # type: ignore[call-overload]  # takes any sequence
            config.stream = current_stream(device)
            # The driver copies the struct before it returns. A RawKernel's call takes twice the time of this.
            error = cu_launch(config_at, handle, parameters_at, None)
            if error:
                raise driver.CUDADriverError(error)

        launch.keep = self._owner, parameters  # type: ignore[attr-defined]  # as long as their addresses are used
        return launch


@functools.cache
def _cuda_driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    driver.cuFuncSetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return driver


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
        except OtherGpu as error:
            found.append(KernelStatus(name, "other", str(error)))
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
    wanted, found = ONLY_ON.get(name), torch.cuda.get_device_capability(device)
    if wanted and wanted != found:
        raise OtherGpu(f"it is for compute capability {wanted[0]}.{wanted[1]}, this GPU has {found[0]}.{found[1]}")
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
            if wanted:
                module = cupy.cuda.Module()
                module.load(_compile(source, f"sm_{wanted[0]}{wanted[1]}a"))
            else:
                module = cupy.RawModule(
                    code=source.read_text(encoding="utf-8"), options=("-std=c++17", f"-I{source.parent}")
                )
            return Kernel(device, _functions(module, name), KernelStatus(name, "runtime", why_not_prebuilt))
        except Exception as error:
            # CuPy does not compile where it cannot keep the result.
            fix = "; set CUPY_CACHE_DIR to a folder that can be written" if isinstance(error, OSError) else ""
            found = f"{why_not_prebuilt}, and compiling it failed: {error}{fix}"
            raise KernelUnavailable(f"kernel {name}: {found}") from error


def _compile(source: Path, arch: str) -> bytes:
    """Machine code that uses what one kind of GPU alone has, such as ``sm_90a``: CuPy asks NVRTC for ``sm_90`` only.

    It is kept in CuPy's folder, under the hash of the source and of all headers, its own hash after it: what was cut
    short or damaged is compiled again.
    """
    from cupy_backends.cuda.libs import nvrtc

    headers = {path.name.encode(): path.read_bytes() for path in sorted(source.parent.glob("*.cuh"))}
    text = source.read_text(encoding="utf-8")
    parts = arch.encode(), str(nvrtc.getVersion()).encode(), text.encode(), *headers, *headers.values()
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    kept = _kernel_cache() / f"{source.stem}_{digest}.cubin"
    with contextlib.suppress(OSError):
        whole = kept.read_bytes()
        cubin, check = whole[:-_CHECK_BYTES], whole[-_CHECK_BYTES:]
        if hashlib.sha256(cubin).digest() == check:
            return cubin
    program = nvrtc.createProgram(text, source.name, tuple(headers.values()), tuple(headers))
    try:
        nvrtc.compileProgram(program, ("-std=c++17", f"-arch={arch}"))
        cubin = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(nvrtc.getProgramLog(program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)
    with contextlib.suppress(OSError):  # a folder that cannot be written costs the next process the time again
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as half:
            half.write(cubin + hashlib.sha256(cubin).digest())
        os.replace(half.name, kept)
    return cubin


def _kernel_cache() -> Path:
    """CuPy's folder of compiled kernels; one that cannot be made where the user has no home."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    return Path(os.devnull)


def _find_source(name: str) -> Path | None:
    return next((path for folder in SOURCES if (path := folder / f"{name}.cu").exists()), None)


def _why_not_fresh(name: str, source: Path | None) -> str:
    """Why the fatbin must not be used, "" if it may be."""
    fatbin = FATBINS / f"{name}.fatbin"
    if not fatbin.exists():
        return "no fatbin was built"
    # In a checkout the source may have been edited since. A wheel's files are as old as each other, about.
    if source is not None and source.parent == SOURCES[1]:
        sources = [source, *source.parent.glob("*.cuh")]
        if max(path.stat().st_mtime for path in sources) > fatbin.stat().st_mtime:
            return "the fatbin is older than its source"
    return ""


def _functions(module: Any, name: str) -> dict[str, Any]:
    found = {entry: module.get_function(entry) for entry in KERNELS[name]}
    return {entry: getattr(function, "kernel", function) for entry, function in found.items()}
