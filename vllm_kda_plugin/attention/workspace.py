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


def reserve(vllm_config: VllmConfig, num_kv_heads: int, head_size: int) -> None:
    """Make the engine's workspace large enough for any gather of a layer, before it is locked.

    That is the budget, or one request of the longest length, in the widest dtype: a workspace that grew with
    a request would be made anew at each of its tokens. Memory that is never touched costs nothing on the CPU.

    Raises:
        MemoryError: there is not that much memory; the message names the setting.
    """
    longest = vllm_config.model_config.max_model_len if vllm_config.model_config else 0
    num_bytes = max(budget_bytes(vllm_config), longest * num_kv_heads * 2 * head_size * torch.float32.itemsize)
    try:
        _slice((num_bytes,), torch.uint8)
    except RuntimeError as error:
        raise MemoryError(
            f"no memory for a gather workspace of {num_bytes >> 20} MiB; lower kda_plugin.gather_workspace_mib "
            f"(now {budget_bytes(vllm_config) >> 20}) or --max-model-len (now {longest})"
        ) from error


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
