"""The kernel loader without a GPU: what it says when something is missing, and which of its two paths it takes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pwd
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from vllm_kda_plugin.kernels import loader
from vllm_kda_plugin.kernels.loader import CuPyUnavailable, KernelStatus, KernelUnavailable, check_cupy, kernel_status

ROOT = Path(loader.__file__).parents[2]
NAME = "gather_cached_kv"


def status_of(name: str = NAME) -> KernelStatus:
    return next(status for status in kernel_status() if status.name == name)


def test_every_source_is_a_known_kernel() -> None:
    assert sorted(loader.KERNELS) == sorted(source.stem for source in (ROOT / "csrc").glob("*.cu"))


def distributions(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = [SimpleNamespace(name=name) for name in (*names, "numpy", None)]
    monkeypatch.setattr(loader.importlib.metadata, "distributions", lambda: found)


@pytest.mark.parametrize(("cuda", "name"), [("12.8", "cupy-cuda12x"), ("13.0", "cupy-cuda13x"), ("13.0", "cupy")])
def test_cupy_for_the_cuda_of_torch_is_taken(cuda: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch, name)
    check_cupy(cuda)


@pytest.mark.parametrize(
    ("cuda", "names", "fix"),
    [
        ("12.8", [], "not installed; run: pip install cupy-cuda12x"),
        ("13.0", [], "not installed; run: pip install cupy-cuda13x"),
        ("13.0", ["cupy-cuda12x"], "pip uninstall -y cupy-cuda12x && pip install cupy-cuda13x"),
        ("12.6", ["cupy-cuda13x"], "pip uninstall -y cupy-cuda13x && pip install cupy-cuda12x"),
        (
            "13.0",  # they overwrite each other's files
            ["cupy-cuda13x", "cupy-cuda12x"],
            "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install cupy-cuda13x",
        ),
    ],
)
def test_missing_or_other_cupy_is_reported_with_the_fix(
    cuda: str, names: list[str], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributions(monkeypatch, *names)
    with pytest.raises(CuPyUnavailable, match=f"{re.escape(fix)}$") as caught:
        check_cupy(cuda)
    assert isinstance(caught.value, ImportError)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
def test_status_with_a_cpu_build_of_torch() -> None:
    status = status_of()
    assert (status.name, status.state) == (NAME, "none")
    assert "built without CUDA; install a CUDA build of torch" in status.detail
    with pytest.raises(KernelUnavailable, match="built without CUDA"):
        loader.load(NAME, 0)


def test_status_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from vllm_kda_plugin.kernels.loader import kernel_status\n"
        "print(kernel_status())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "state='none'" in done.stdout
    assert "torch" in done.stdout


class FakeModule:
    """CuPy's RawModule; ``broken`` are the sources it fails to load or compile: "path", "code"."""

    broken: tuple[str, ...] = ()

    def __init__(self, **source: Any) -> None:
        self.source = source

    def get_function(self, entry: str) -> Any:
        for kind in self.broken:
            if kind in self.source:
                raise RuntimeError(f"{kind} is broken")
        return SimpleNamespace(kernel=SimpleNamespace(ptr=hash(entry)))


class Launched(NamedTuple):
    """What the driver was told."""

    handle: int
    grid: tuple[int, int, int, int, int, int]
    shared: int
    stream: int
    attributes: list[tuple[int, int]]
    arguments: list[int]


class CudaError(RuntimeError):
    """CuPy's CUDADriverError."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine that seems to have a GPU and CuPy. Launches are noted in ``launches``."""
    fake = SimpleNamespace(
        launches=[], context=1, current=0, devices=[], capturing=False, capability=(9, 0), error=0, reading=lambda: None
    )

    def launch_kernel(config_at: int, handle: int, parameters_at: int, extra: None) -> int:
        config = loader._Config.from_address(config_at)
        struct = ctypes.c_void_p.from_address(parameters_at).value
        assert struct is not None
        fake.reading()  # the driver reads the struct some time into the call
        grid = (config.grid_x, config.grid_y, config.grid_z, config.block_x, config.block_y, config.block_z)
        attributes = (loader._Attribute * config.num_attributes).from_address(config.attributes or config_at)
        early = [(attribute.id, attribute.value[0]) for attribute in attributes]
        arguments = list((ctypes.c_longlong * 5).from_address(struct))
        fake.launches.append(Launched(handle, grid, config.shared, config.stream, early, arguments))
        return int(fake.error)

    @contextlib.contextmanager
    def use_device(index: int) -> Any:
        before, fake.current = fake.current, index
        yield
        fake.current = before

    def set_device(index: int) -> None:
        fake.devices.append(index)
        fake.current = index

    runtime = SimpleNamespace(setDevice=set_device)
    driver = SimpleNamespace(ctxGetCurrent=lambda: fake.context, CUDADriverError=CudaError)
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(RawModule=FakeModule, cuda=SimpleNamespace(runtime=runtime))
    )
    for module in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", SimpleNamespace(driver=driver, runtime=runtime))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: fake.capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "device", use_device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fake.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    monkeypatch.setattr(FakeModule, "broken", ())
    monkeypatch.setattr(loader, "FATBINS", tmp_path)
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "_cuda_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch_kernel))
    distributions(monkeypatch, "cupy-cuda13x")
    return fake


def test_fatbin_is_preferred(gpu: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.fatbin").touch()
    assert status_of() == KernelStatus(NAME, "prebuilt")


def test_source_is_compiled_where_no_fatbin_was_built(gpu: SimpleNamespace) -> None:
    assert status_of() == KernelStatus(NAME, "runtime", "no fatbin was built")


def test_source_is_compiled_where_the_fatbin_is_for_other_gpus(
    gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{NAME}.fatbin").touch()
    monkeypatch.setattr(FakeModule, "broken", ("path",))
    status = status_of()
    assert status == KernelStatus(NAME, "runtime", "the fatbin does not load on this GPU (path is broken)")


def test_source_is_compiled_where_it_is_newer_than_the_fatbin(gpu: SimpleNamespace, tmp_path: Path) -> None:
    fatbin = tmp_path / f"{NAME}.fatbin"
    fatbin.touch()
    os.utime(fatbin, (0, 0))
    assert status_of() == KernelStatus(NAME, "runtime", "the fatbin is older than its source")


def test_both_paths_failing_gives_both_reasons(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeModule, "broken", ("code",))
    status = status_of()
    assert status.state == "none"
    assert "no fatbin was built, and compiling it failed: code is broken" in status.detail
    with pytest.raises(KernelUnavailable, match="code is broken"):
        loader.load(NAME, 0)


def test_source_missing_as_well(gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "SOURCES", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(KernelUnavailable, match="its source is missing; reinstall"):
        loader.load(NAME, 0)


class FakeNvrtc:
    """CuPy's bindings of NVRTC."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.options: list[tuple[str, ...]] = []
        self.created: list[tuple[Any, ...]] = []
        self.log = ""

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, *given: Any) -> int:
        self.created.append(given)
        return 5

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.options.append(options)
        if self.log:
            raise self.NVRTCError

    def getCUBIN(self, program: int) -> bytes:
        return b"machine code"

    def getProgramLog(self, program: int) -> str:
        return self.log

    def destroyProgram(self, program: int) -> None:
        assert program == 5


@pytest.fixture
def nvrtc(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    fake = FakeNvrtc()
    for module in ("cupy_backends.cuda.libs", "cupy_backends"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(nvrtc=fake))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules["cupy"].cuda, "Module", BareModule, raising=False)
    return fake


class BareModule:
    """CuPy's Module."""

    def load(self, cubin: bytes) -> None:
        assert cubin == b"machine code"

    def get_function(self, entry: str) -> Any:
        return SimpleNamespace(ptr=hash(entry))


def test_a_kernel_for_one_kind_of_gpu_is_compiled_for_all_it_has_and_kept(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    name = "kda_prefill_sm90"
    for _ in range(2):
        loader._loaded.clear()
        assert status_of(name) == KernelStatus(name, "runtime", "no fatbin was built")
    ((option, arch),) = nvrtc.options
    assert (option, arch) == ("-std=c++17", "-arch=sm_90a")
    ((text, file, headers, names),) = nvrtc.created
    assert file == f"{name}.cu"
    assert dict(zip(names, headers, strict=True)) == {
        path.name.encode(): path.read_bytes() for path in (ROOT / "csrc").glob("*.cuh")
    }
    assert f'#include "{names[0].decode()}"' in text
    assert len(kept(tmp_path)) == 1
    assert kept(tmp_path)[0].read_bytes().startswith(b"machine code")


def test_it_is_compiled_where_nothing_can_be_kept(
    nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert status_of("kda_prefill_sm90").state == "runtime"


def kept(folder: Path) -> list[Path]:
    return list((folder / "cache").iterdir())


@pytest.mark.parametrize(
    "damaged",
    [lambda whole: whole[:-1], lambda whole: whole[:5], lambda whole: b"M" + whole[1:], lambda whole: b""],
    ids=["end cut off", "most cut off", "another byte", "empty"],
)
def test_it_is_compiled_again_where_what_was_kept_is_damaged(
    nvrtc: FakeNvrtc, tmp_path: Path, damaged: Callable[[bytes], bytes]
) -> None:
    assert status_of("kda_prefill_sm90").state == "runtime"
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damaged(whole))
    loader._loaded.clear()
    assert status_of("kda_prefill_sm90") == KernelStatus("kda_prefill_sm90", "runtime", "no fatbin was built")
    assert len(nvrtc.options) == 2
    assert file.read_bytes() == whole


@pytest.mark.parametrize("home", ["/proc/self", None], ids=["read-only", "none"])
def test_it_is_compiled_without_a_home_to_keep_it_in(
    nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR")
    if home:
        monkeypatch.setenv("HOME", home)
    else:  # as for a user id that /etc/passwd does not list

        def no_such_user(uid: int) -> None:
            raise KeyError(uid)

        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", no_such_user)
        with pytest.raises(RuntimeError, match="home"):
            Path.home()
    assert status_of("kda_prefill_sm90") == KernelStatus("kda_prefill_sm90", "runtime", "no fatbin was built")


def test_a_cache_that_cupy_cannot_write_is_named_with_the_fix(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(self: FakeModule, entry: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/home/me/.cupy")

    monkeypatch.setattr(FakeModule, "get_function", read_only)
    told = "Read-only file system: '/home/me/.cupy'; set CUPY_CACHE_DIR to a folder that can be written"
    assert status_of().state == "none"
    assert status_of().detail.endswith(told)


def test_neither_fatbin_nor_compiler(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A damaged fatbin and a broken NVRTC: both are told."""
    name = "kda_prefill_sm90"
    (tmp_path / f"{name}.fatbin").write_bytes(b"no fatbin")
    monkeypatch.setattr(FakeModule, "broken", ("path",))
    nvrtc.log = "libnvrtc-builtins.so.13.0 is missing"
    told = "the fatbin does not load on this GPU (path is broken), and compiling it failed: libnvrtc-builtins"
    assert told in status_of(name).detail


def test_the_compilers_words_are_the_status(nvrtc: FakeNvrtc) -> None:
    nvrtc.log = "line 7: expected a ;"
    assert status_of("kda_prefill_sm90").detail.endswith("compiling it failed: line 7: expected a ;")


def test_a_kernel_for_other_gpus_is_no_fault(gpu: SimpleNamespace) -> None:
    gpu.capability = (10, 0)
    found = KernelStatus("kda_prefill_sm90", "other", "it is for compute capability 9.0, this GPU has 10.0")
    assert status_of("kda_prefill_sm90") == found
    with pytest.raises(KernelUnavailable, match=r"for compute capability 9\.0, this GPU has 10\.0"):
        loader.load("kda_prefill_sm90", 0)


def test_missing_cupy_is_the_status(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch)
    status = status_of()
    assert status.state == "none"
    assert status.detail.endswith("run: pip install cupy-cuda13x")


def test_cupy_that_does_not_import(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CuPyUnavailable, match=r"fails to import .*pip install --force-reinstall cupy-cuda13x"):
        loader.load(NAME, 0)


def test_nothing_is_loaded_during_capture(gpu: SimpleNamespace) -> None:
    gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"call load\('gather_cached_kv', 0\) before the capture"):
        loader.load(NAME, 0)
    gpu.capturing = False
    kernel = loader.load(NAME, 0)
    gpu.capturing = True
    assert loader.load(NAME, 0) is kernel


def test_each_gpu_has_its_own_and_threads_share_it(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    load = loader._load
    calls: list[int] = []
    barrier = threading.Barrier(8)
    found: list[loader.Kernel] = []

    def counted(name: str, device: int) -> loader.Kernel:
        calls.append(device)
        return load(name, device)

    def work(device: int) -> None:
        barrier.wait()
        found.append(loader.load(NAME, device))

    monkeypatch.setattr(loader, "_load", counted)
    threads = [threading.Thread(target=work, args=(index % 2,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == [0, 1]
    assert len(found) == 8
    assert len(set(map(id, found))) == 2


EARLY = [(6, 1)]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: allowed


def test_launch_passes_the_arguments_as_one_struct_on_torchs_stream(gpu: SimpleNamespace) -> None:
    launch = loader.load(NAME, 0).prepare("gather_elements_4", 5, 256, 2, [-3, 2**40, -(2**62)], comes_early=True)
    gpu.devices.clear()
    launch(2**63 - 1, 7)
    launch(0, 2**47)
    handle, grid = hash("gather_elements_4"), (5, 1, 1, 256, 1, 1)
    assert gpu.launches == [
        Launched(handle, grid, 0, 70, EARLY, [2**63 - 1, 7, -3, 2**40, -(2**62)]),
        Launched(handle, grid, 0, 70, EARLY, [0, 2**47, -3, 2**40, -(2**62)]),
    ]
    assert gpu.devices == []


@pytest.mark.parametrize(("capability", "attributes"), [((8, 0), []), ((8, 9), []), ((9, 0), EARLY), ((12, 0), EARLY)])
def test_kernels_come_early_where_they_know_to_wait(
    gpu: SimpleNamespace, capability: tuple[int, int], attributes: list[tuple[int, int]]
) -> None:
    gpu.capability = capability
    for comes_early in (True, False):
        loader.load(NAME, 0).prepare("gather_elements_4", 1, 256, 1, [2, 3, 4, 5], comes_early=comes_early)(1)
    assert [launched.attributes for launched in gpu.launches] == [attributes, []]


def test_unknown_entry_point(gpu: SimpleNamespace) -> None:
    with pytest.raises(KeyError, match="gather_nothing"):
        loader.load(NAME, 0).prepare("gather_nothing", 1, 1, 1, [])


def test_launch_that_the_driver_refuses_is_an_error(gpu: SimpleNamespace) -> None:
    launch = loader.load(NAME, 0).prepare("gather_elements_4", 1, 256, 1, [2, 3, 4, 5])
    gpu.error = 701
    with pytest.raises(CudaError, match="701"):
        launch(1)


def test_launch_switches_to_the_kernels_gpu_and_back(gpu: SimpleNamespace) -> None:
    launch = loader.load(NAME, 1).prepare("gather_elements_4", 1, 256, 1, [2, 3, 4, 5])
    assert gpu.launches == []
    launch(1)
    launch.of_this_thread()(9)
    assert [(launched.stream, launched.arguments[0]) for launched in gpu.launches] == [(71, 1), (71, 9)]
    assert gpu.current == 0


def test_a_thread_without_a_context_gets_one_before_it_launches(gpu: SimpleNamespace) -> None:
    launch = loader.load(NAME, 0).prepare("gather_elements_4", 1, 256, 1, [2, 3, 4, 5])
    gpu.devices.clear()
    gpu.context = 0
    launch(1)
    assert gpu.devices == [0]


def test_a_thread_without_a_context_keeps_its_device(gpu: SimpleNamespace) -> None:
    launch = loader.load(NAME, 1).prepare("gather_elements_4", 7, 64, 2, [5, 6, 7])
    gpu.context, gpu.current, gpu.devices = 0, 0, []
    launch(8, 9)
    assert gpu.current == 0
    assert gpu.devices == []  # torch.cuda.device makes the context
    assert gpu.launches[-1].stream == 71


def test_more_blocks_than_a_grid_has_are_refused(gpu: SimpleNamespace) -> None:
    kernel = loader.load(NAME, 0)
    kernel.prepare("gather_elements_4", 2**31 - 1, 64, 2, [5, 6, 7])
    with pytest.raises(ValueError, match=r"^gather_elements_4 would need 2,147,483,648 thread blocks"):
        kernel.prepare("gather_elements_4", 2**31, 64, 2, [5, 6, 7])


def test_threads_launching_at_once_do_not_see_each_others_pointers(gpu: SimpleNamespace) -> None:
    launch = loader.load(NAME, 0).prepare("gather_elements_4", 1, 256, 2, [3, 4, 5])
    gpu.reading = threading.Barrier(8).wait  # all have written their pointers, none has read them
    threads = [threading.Thread(target=launch, args=(index, 100 + index)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(launched.arguments for launched in gpu.launches) == [[i, 100 + i, 3, 4, 5] for i in range(8)]
