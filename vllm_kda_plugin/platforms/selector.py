"""Lets the platform's backend selector honour our names.

The CPU platform ignores ``--attention-backend`` and always takes CPU_ATTN; on every platform a layer
with multi-head latent attention (MLA) would refuse a backend that is not for MLA and end the engine.
Both are settled here, for our own names only, around ``Platform.get_attn_backend_cls``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kda_plugin.config import PluginConfig
from vllm_kda_plugin.platforms.registry import backend_path, is_ours

if TYPE_CHECKING:
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.kda_plugin")

_INSTALLED = "_kda_plugin_installed"


def install() -> None:
    """Wrap the current platform's selector and configuration check, once a process."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if backend_path(current_platform) is None or getattr(platform, _INSTALLED, False):
        return
    _wrap(platform, "get_attn_backend_cls", _select)
    _wrap(platform, "check_and_update_config", _check_config)
    setattr(platform, _INSTALLED, True)


def _wrap(platform: type[Platform], name: str, replacement: Any) -> None:
    original = getattr(platform, name).__func__

    @functools.wraps(original)
    def method(cls: type[Platform], *args: Any, **kwargs: Any) -> Any:
        return replacement(functools.partial(original, cls), cls, *args, **kwargs)

    setattr(platform, name, classmethod(method))


def _select(
    stock: Any,
    platform: type[Platform],
    selected_backend: AttentionBackendEnum | None,
    attn_selector_config: AttentionSelectorConfig,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if selected_backend is None or not is_ours(selected_backend):
        return stock(selected_backend, attn_selector_config, *args, **kwargs)
    if attn_selector_config.use_mla or attn_selector_config.use_sparse:
        logger.info_once("%s does not do MLA: those layers use the platform's own choice.", selected_backend.name)
        return stock(None, attn_selector_config, *args, **kwargs)
    if platform._enum.name == "CPU":
        path = _select_on_cpu(selected_backend, attn_selector_config)
    else:
        path = stock(selected_backend, attn_selector_config, *args, **kwargs)
    logger.info_once("Using %s attention backend (%s).", selected_backend.name, path)
    return path


def _select_on_cpu(selected_backend: AttentionBackendEnum, attn_selector_config: AttentionSelectorConfig) -> str:
    """What the CUDA platform does with any backend that is asked for, and the CPU platform with none."""
    reasons = selected_backend.get_class().validate_configuration(
        device_capability=None, **attn_selector_config._asdict()
    )
    if reasons:
        raise ValueError(f"Selected backend {selected_backend} is not valid for this configuration. Reason: {reasons}")
    return selected_backend.get_path()


def _check_config(stock: Any, platform: type[Platform], vllm_config: Any) -> None:
    stock(vllm_config)
    # Here, in the process that reads the command line, a wrong setting is told before any engine starts.
    PluginConfig.from_vllm(vllm_config)
