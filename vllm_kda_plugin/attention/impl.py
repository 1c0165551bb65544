"""One attention layer on the torch path: writes the KV cache, gathers from it, attends."""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from vllm_kda_plugin.attention import workspace
from vllm_kda_plugin.attention.metadata import GatherMetadata, Request
from vllm_kda_plugin.attention.sdpa import Attention
from vllm_kda_plugin.attention.stats import STATS, reporter
from vllm_kda_plugin.config import PluginConfig
from vllm_kda_plugin.kernels.gather_torch import gather_rows


class GatherTorchImpl(AttentionImpl[GatherMetadata]):
    """Gather, then attend, with torch operators only."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks must have shape ({num_heads},), one for each head, found {tuple(sinks.shape)}")
        self.attention = Attention(
            scale=self.scale,
            window=_window(sliding_window, attn_type),
            soft_cap=logits_soft_cap or 0.0,
            alibi_slopes=None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
            sinks=sinks,
        )
        vllm_config = get_current_vllm_config()
        workspace.reserve(vllm_config, self.num_kv_heads, head_size)
        self.reporter = reporter(PluginConfig.from_vllm(vllm_config).log_stats)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's K and V into the cache.

        Args:
            layer: unused, vLLM passes the attention layer.
            key: ``[num_tokens, num_kv_heads, head_size]``.
            value: like ``key``.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, any strides.
            slot_mapping: int64 ``[num_tokens or fewer]``, block * block_size + offset, -1 to leave out.
        """
        if self.attn_type in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER):
            return
        num_tokens = slot_mapping.shape[0]
        key, value = key[:num_tokens], value[:num_tokens]
        if bool((slot_mapping < 0).any()):
            kept = slot_mapping >= 0
            key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
        block_size = kv_cache.shape[2]
        at = (slot_mapping // block_size, slot_mapping % block_size)
        tokens_first = kv_cache.transpose(1, 2)
        tokens_first[..., : self.head_size][at] = key.to(kv_cache.dtype)
        tokens_first[..., self.head_size :][at] = value.to(kv_cache.dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: GatherMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one step.

        Args:
            layer: unused, vLLM passes the attention layer.
            query: ``[num_tokens, num_heads, head_size]``.
            key: ``[num_tokens, num_kv_heads, head_size]``, already in the cache; None where another layer's
                cache is shared.
            value: like ``key``.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, any strides.
            attn_metadata: the step, None in a profiling run.
            output: like ``query``, written in place.
            output_scale: not supported, as the backend says to vLLM.
            output_block_scale: likewise.

        Returns:
            ``output``.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("vllm-kda-plugin: fused quantisation of the attention output is not supported")
        if attn_metadata is None:
            return output.zero_()
        for gather in attn_metadata.gathers:
            num_tokens = gather.slots.shape[0]
            packed = workspace.kv_slice(num_tokens, self.num_kv_heads, self.head_size, kv_cache.dtype)
            gather_rows(kv_cache, gather.slots, packed)
            STATS.gathers += 1
            STATS.gathered_tokens += num_tokens
            STATS.gathered_bytes += packed.nbytes
            packed = packed.to(query.dtype)
            keys, values = packed[..., : self.head_size], packed[..., self.head_size :]
            self._attend(query, keys, values, gather.requests, output)
        if attn_metadata.fresh:
            assert key is not None
            assert value is not None
            self._attend(query, key, value, attn_metadata.fresh, output)
        STATS.implementation = IMPLEMENTATION
        self.reporter.forward()
        return output

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        requests: list[Request],
        output: torch.Tensor,
    ) -> None:
        for request in requests:
            self.attention(
                query[request.query],
                keys[request.keys],
                values[request.keys],
                output[request.query],
                context=request.context,
                first_key=request.first_key,
                causal=request.causal,
            )


def _window(sliding_window: int | None, attn_type: str) -> tuple[int | None, int | None]:
    """Keys seen left and right of a query, as vLLM's FlashAttention backend has it."""
    if sliding_window is None:
        return (None, None)
    both_sides = attn_type in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)
    return (sliding_window - 1, sliding_window - 1 if both_sides else 0)


# The name in the statistics, also where vLLM made a subclass for cross attention.
IMPLEMENTATION = f"{GatherTorchImpl.__module__}.{GatherTorchImpl.__qualname__}"
