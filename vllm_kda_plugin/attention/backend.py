"""What vLLM asks about the torch backend: names, supported features, and the classes that do the work."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType

from vllm_kda_plugin.attention.impl import GatherTorchImpl
from vllm_kda_plugin.attention.metadata import GatherMetadataBuilder


class GatherTorchBackend(AttentionBackend):
    """Paged KV gathered into contiguous K and V, then attention on them, all in torch.

    Takes any KV layout, block size and head size: it reads shape and strides of the cache it is given.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "float32"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GatherTorchImpl]:
        return GatherTorchImpl

    @staticmethod
    def get_builder_cls() -> type[GatherMetadataBuilder]:
        return GatherMetadataBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER,
            AttentionType.ENCODER_ONLY,
            AttentionType.ENCODER_DECODER,
        )

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the plan is made from the query lengths on the host

    @classmethod
    def supports_sink(cls) -> bool:
        return True
