"""Attention layers without an engine: each backend's own metadata builder and implementation, for made-up batches."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

from vllm_kda_plugin.attention.flash import GatherFlashAttentionBackend
from vllm_kda_plugin.bench.attention_cases import Batch, Shape

PEERS = ("FLASHINFER", "TRITON_ATTN")
_NAME = "layer"
# What vllm serve takes without flags on such a GPU, as far as builders ask.
_MAX_TOKENS, _MAX_SEQS, _MAX_CAPTURED = 8192, 1024, 512
_MAX_LEN = 131_072


class _Layer(AttentionLayerBase):
    """What builders look up by name, to ask its implementation."""

    def __init__(self, impl: Any) -> None:
        self.impl = impl

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Backend:
    """One backend's builder and implementation, called as an engine's model runner and attention layer call them."""

    name: str
    builder: Any
    impl: Any
    scales: Any
    """Stands for the layer that the implementation is given: it reads the scales of an fp8 cache there."""

    def build(self, batch: Batch) -> Any:
        """The step's metadata."""
        return self.builder.build(0, batch.common)

    def forward(self, batch: Batch, layer: int, metadata: Any) -> None:
        """Attention of one layer, into ``batch.out``."""
        cache = batch.caches[layer]
        query, key, value = batch.query[layer], batch.key[layer], batch.value[layer]
        self.impl.forward(self.scales, query, key, value, cache, metadata, batch.out)


def stock(shape: Shape, page: int, device: torch.device, kv_cache_dtype: str = "auto") -> Backend:
    """vLLM's FLASH_ATTN."""
    return _make(FlashAttentionBackend, shape, page, device, {}, kv_cache_dtype)


def ours(shape: Shape, page: int, device: torch.device, gather: str = "auto", kv_cache_dtype: str = "auto") -> Backend:
    """This plugin's backend; ``gather`` is its setting of that name, others come from the environment."""
    return _make(GatherFlashAttentionBackend, shape, page, device, {"kda_plugin": {"gather": gather}}, kv_cache_dtype)


def peer(name: str, shape: Shape, page: int, device: torch.device) -> Backend:
    """Another of vLLM's backends.

    Raises:
        Exception: whatever it or its imports raise where it cannot be used.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return _make(AttentionBackendEnum[name].get_class(), shape, page, device, {}, "auto")


def _make(
    backend: type[AttentionBackend],
    shape: Shape,
    page: int,
    device: torch.device,
    settings: dict[str, Any],
    kv_cache_dtype: str,
) -> Backend:
    if not is_workspace_manager_initialized():
        init_workspace_manager(device)
    given = VllmConfig(additional_config=settings)
    with set_current_vllm_config(given), torch.device(device):  # as vLLM makes its layers
        impl: Any = backend.get_impl_cls()(
            shape.num_heads, shape.head_size, shape.head_size**-0.5, shape.num_kv_heads, None, None, kv_cache_dtype
        )
    spec = FullAttentionSpec(
        block_size=page,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        dtype=torch.bfloat16 if kv_cache_dtype == "auto" else torch.uint8,
    )
    config: Any = _engine_config(given, impl, shape, kv_cache_dtype)
    with set_current_vllm_config(given):
        builder: Any = backend.get_builder_cls()(spec, [_NAME], config, device)
    one = torch.ones((), device=device)
    scales = {f"_{name}_scale": one for name in "qkv"} | {f"_{name}_scale_float": 1.0 for name in "qkv"}
    return Backend(backend.get_name(), builder, impl, SimpleNamespace(**scales))


def _engine_config(given: VllmConfig, impl: Any, shape: Shape, kv_cache_dtype: str) -> SimpleNamespace:
    """What builders read of an engine's configuration; a real one needs a model on disk."""
    return SimpleNamespace(
        additional_config=given.additional_config,
        attention_config=given.attention_config,
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            max_model_len=_MAX_LEN,
            rswa_window=None,
            is_mm_prefix_lm=False,
            is_diffusion=False,
            hf_config=SimpleNamespace(model_type="llama"),
            get_num_attention_heads=lambda _: shape.num_heads,
            get_num_kv_heads=lambda _: shape.num_kv_heads,
            get_head_size=lambda: shape.head_size,
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1,
            dcp_comm_backend="ag_rs",
            use_ubatching=False,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(cache_dtype=kv_cache_dtype, get_resolved_kv_cache_layout=_layout),
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            max_cudagraph_capture_size=_MAX_CAPTURED,
            cudagraph_capture_sizes=[1, 2, 4, *range(8, _MAX_CAPTURED + 1, 8)],
            static_forward_context={_NAME: _Layer(impl)},
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=_MAX_SEQS, max_num_batched_tokens=_MAX_TOKENS),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        speculative_config=None,
        num_speculative_tokens=0,
        use_v2_model_runner=True,
    )


def _layout() -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout.LBNHC  # how attention_cases lays the cache out
