"""Settings of the plugin: ``--additional-config '{"kda_plugin": {...}}'`` and ``VLLM_KDA_*`` variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_kda_plugin.kernels.checks import CHECK_VARIABLE, debug_checks

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECTION = "kda_plugin"
ENV_PREFIX = "VLLM_KDA_"
_MOST_MIB = 1 << 20
_ALLOWED = {
    "gather_workspace_mib": f"a whole number from 1 to {_MOST_MIB}",
    "log_stats": "true or false",
    "gather": "auto, always or never",
    "calibration": "the path of a file that vllm-kda bench attention --calibrate wrote",
    "prefill": "auto, native, flashkda, triton or torch",
}
# The first is read by setup.py, the second by debug_checks(): neither is a setting of one engine.
_OTHER_VARIABLES = {"VLLM_KDA_ARCHS", CHECK_VARIABLE}


class PluginConfig(BaseModel):
    """The settings, validated; the environment gives defaults, ``kda_plugin`` wins over it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gather_workspace_mib: int = Field(default=256, ge=1, le=_MOST_MIB)
    """MiB that one gather may fill; a single longer request may exceed it on the CPU."""

    log_stats: bool = False
    """Log the attention counters while requests are served, at most every 10 seconds, not only at shutdown."""

    gather: Literal["auto", "always", "never"] = "auto"
    """On CUDA: attend to fresh or gathered K and V where that is predicted to be faster, wherever it can be done, or
    nowhere. The CPU's backend always gathers."""

    calibration: str = ""
    """File that ``vllm-kda bench attention --calibrate`` wrote on this GPU; "" for what comes with the package."""

    prefill: Literal["auto", "native", "flashkda", "triton", "torch"] = "auto"
    """The kernel of KDA layers' prefill; auto is the fastest that was measured, see README."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> PluginConfig:
        """The settings of one engine.

        Raises:
            ValueError: naming each wrong key or variable, what was found and what is allowed.
        """
        additional = vllm_config.additional_config
        section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
        return cls.load(section, os.environ)

    @classmethod
    def load(cls, section: Any, environ: Mapping[str, str]) -> PluginConfig:
        """The settings from the ``kda_plugin`` section and an environment; see :meth:`from_vllm`."""
        if not isinstance(section, Mapping):
            raise ValueError(
                f"{SECTION} in --additional-config must be an object with any of {_allowed_keys()}, found {section!r}"
            )
        variables = {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(ENV_PREFIX) and name not in _OTHER_VARIABLES
        }
        debug_checks(environ)
        from_env = _validate(cls, variables, lambda key: ENV_PREFIX + key.upper(), strict=False)
        from_section = _validate(cls, dict(section), lambda key: f"{SECTION}.{key}", strict=True)
        return from_section.model_copy(
            update={key: getattr(from_env, key) for key in from_env.model_fields_set - from_section.model_fields_set}
        )


def _allowed_keys() -> str:
    return ", ".join(PluginConfig.model_fields)


def _validate(cls: type[PluginConfig], values: dict[str, Any], label: Any, *, strict: bool) -> PluginConfig:
    try:
        return cls.model_validate(values, strict=strict)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(problem, label) for problem in error.errors())) from None


def _explain(problem: Any, label: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        allowed = ", ".join(label(name) for name in PluginConfig.model_fields)
        return f"{label(key)} is no setting of vllm-kda-plugin; allowed are {allowed}"
    return f"{label(key)} = {problem['input']!r} is not allowed; allowed is {_ALLOWED[key]}"
