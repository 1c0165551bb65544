"""The backend on CUDA: vLLM's FlashAttention backend under our name, and counted.

It does not gather yet: every layer runs what ``--attention-backend FLASH_ATTN`` runs, but for models that vLLM
ties to the name FLASH_ATTN.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from vllm_kda_plugin.attention.stats import STATS, reporter
from vllm_kda_plugin.config import PluginConfig


class GatherFlashAttentionImpl(FlashAttentionImpl):
    """vLLM's implementation; replays of a full CUDA graph do not pass here and are not counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reporter = reporter(PluginConfig.from_vllm(get_current_vllm_config()).log_stats)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As vLLM's, see ``FlashAttentionImpl.forward``."""
        STATS.implementation = IMPLEMENTATION
        self.reporter.forward()
        return super().forward(*args, **kwargs)


class GatherFlashAttentionBackend(FlashAttentionBackend):
    """Supports what vLLM's FlashAttention backend supports, for the reasons it gives."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GatherFlashAttentionImpl]:
        return GatherFlashAttentionImpl


IMPLEMENTATION = f"{GatherFlashAttentionImpl.__module__}.{GatherFlashAttentionImpl.__qualname__}"
