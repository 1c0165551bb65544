"""The gather's buffer: a slice of the engine's workspace manager."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    init_workspace_manager,
    is_workspace_manager_initialized,
)

from vllm_kda_plugin.config import PluginConfig


def budget_bytes(vllm_config: VllmConfig) -> int:
    """Bytes that one gather may fill: ``kda_plugin.gather_workspace_mib``."""
    return PluginConfig.from_vllm(vllm_config).gather_workspace_mib << 20


def reserve(num_bytes: int) -> None:
    """Make the engine's workspace at least ``num_bytes`` large, before it is locked."""
    _slice((num_bytes,), torch.uint8)


def kv_slice(num_tokens: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    """``[num_tokens, num_kv_heads, 2 * head_size]`` of ``dtype``, K then V in the last dimension.

    Valid until the next caller asks the manager.
    """
    return _slice((num_tokens, num_kv_heads, 2 * head_size), dtype)


def _slice(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not is_workspace_manager_initialized():  # the CPU engine never does
        init_workspace_manager(torch.device("cpu"))
    (buffer,) = current_workspace_manager().get_simultaneous((shape, dtype))
    return buffer
