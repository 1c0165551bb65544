"""The backend's names in vLLM's registry, and the class that each platform puts behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

if TYPE_CHECKING:
    from vllm.platforms.interface import Platform

logger = init_logger("vllm.kda_plugin")

NAME = "GATHER_FLASH_ATTN"
TORCH_BACKEND = "vllm_kda_plugin.attention.backend.GatherTorchBackend"
FLASH_BACKEND = "vllm_kda_plugin.attention.flash.GatherFlashAttentionBackend"


def backend_path(platform: Platform) -> str | None:
    """Dotted path of the backend class for ``platform``, None where there is none."""
    if platform.is_cpu():
        return TORCH_BACKEND
    return FLASH_BACKEND if platform.is_cuda() else None


def register_names() -> None:
    """Put the class behind ``CUSTOM`` and, where vLLM takes new names, ``GATHER_FLASH_ATTN``.

    By path, never by class: the class must not be imported before vLLM asks for it.
    """
    from vllm.platforms import current_platform

    path = backend_path(current_platform)
    if path is None:
        logger.info("vllm-kda-plugin has no attention backend for %s.", current_platform.device_name)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != path:
        logger.warning("CUSTOM already belongs to %s; use --attention-backend %s.", custom.get_path(), NAME)
    else:
        register_backend(custom, path)
    if hasattr(AttentionBackendEnum, "register"):
        named_member(path)


def is_ours(backend: AttentionBackendEnum | None) -> bool:
    """Whether a selected backend resolves to a class of this plugin."""
    return backend is not None and backend.is_overridden() and backend.get_path() in (TORCH_BACKEND, FLASH_BACKEND)


def named_member(path: str) -> AttentionBackendEnum:
    """The enum member ``GATHER_FLASH_ATTN``, made at first use.

    The engine process is spawned and unpickles its configuration before it loads plugins, so the
    member pickles as a call of this function rather than as a look-up of a value.
    """
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, path)
        member: Any = AttentionBackendEnum[NAME]
        member.__reduce_ex__ = lambda protocol: (named_member, (path,))
    return AttentionBackendEnum[NAME]
