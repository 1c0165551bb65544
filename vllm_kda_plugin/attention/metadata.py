"""What one step's attention needs to know, worked out once for all layers of a group."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from vllm_kda_plugin.attention import workspace
from vllm_kda_plugin.kernels.gather_torch import paged_slots

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a step, all host numbers, in tokens."""

    query: slice
    """Its rows of query and output."""
    keys: slice
    """Its rows of the K and V that its gather made contiguous (of the fresh K and V, if none is cached)."""
    first_key: int
    """Position in the sequence of the first of these keys."""
    context: int
    """Position in the sequence of the first query: tokens that were cached before this step."""
    causal: bool


@dataclasses.dataclass(frozen=True)
class Gather:
    """Requests whose K and V are gathered together, so that they fit the workspace."""

    slots: torch.Tensor
    """int64 ``[tokens]``: block * block_size + offset of each token, request after request."""
    requests: list[Request]


@dataclasses.dataclass
class GatherMetadata(AttentionMetadata):
    """A step's attention, for the layers of one group."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    gathers: list[Gather]
    fresh: list[Request]
    """Requests of encoder-only layers, which attend to this step's own K and V and have no cache."""


class GatherMetadataBuilder(AttentionMetadataBuilder[GatherMetadata]):
    """Builds :class:`GatherMetadata`: which cache slots to gather, and which rows are whose."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        self.has_cache = not isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self.window = _shared_window(vllm_config, layer_names)
        row_bytes = kv_cache_spec.num_kv_heads * 2 * kv_cache_spec.head_size * kv_cache_spec.dtype.itemsize
        self.max_gather_tokens = max(workspace.budget_bytes(vllm_config) // row_bytes, 1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GatherMetadata:
        """Work out one step.

        Args:
            common_prefix_len: unused, vLLM passes 0.
            common_attn_metadata: the batch; its sequence lengths are on the CPU, as this platform is.
            fast_build: unused, there is no slower and better plan.
        """
        common = common_attn_metadata
        query_starts = common.query_start_loc_cpu.tolist()
        seq_lens = common.seq_lens[: common.num_reqs].tolist()
        causal = common.causal
        causals = causal.tolist() if isinstance(causal, torch.Tensor) else [causal] * common.num_reqs

        # (row of the block table, the request without its place in a gather, number of keys)
        found: list[tuple[int, Request, int]] = []
        for i in range(common.num_reqs):
            query = slice(query_starts[i], query_starts[i + 1])
            num_queries = query.stop - query.start
            if num_queries == 0:  # padding
                continue
            context = seq_lens[i] - num_queries
            first_key = max(0, context - self.window + 1) if self.window and self.has_cache else 0
            keys = slice(query.start, query.stop)
            found.append((i, Request(query, keys, first_key, context, causals[i]), seq_lens[i] - first_key))

        metadata = GatherMetadata(common.num_actual_tokens, common.slot_mapping, [], [])
        if self.has_cache:
            metadata.gathers = self._plan_gathers(found, common.block_table_tensor)
        else:
            metadata.fresh = [request for _, request, _ in found]
        return metadata

    def _plan_gathers(self, found: list[tuple[int, Request, int]], block_table: torch.Tensor) -> list[Gather]:
        """Pack requests in order, each gather up to the workspace (or one request, if longer)."""
        gathers: list[Gather] = []
        packed: list[tuple[int, Request, int]] = []
        tokens = 0
        for row, request, num_keys in found:
            if packed and tokens + num_keys > self.max_gather_tokens:
                gathers.append(self._gather(packed, block_table))
                packed, tokens = [], 0
            keys = slice(tokens, tokens + num_keys)
            packed.append((row, dataclasses.replace(request, keys=keys), num_keys))
            tokens += num_keys
        if packed:
            gathers.append(self._gather(packed, block_table))
        return gathers

    def _gather(self, packed: list[tuple[int, Request, int]], block_table: torch.Tensor) -> Gather:
        rows = torch.tensor([row for row, _, _ in packed])
        starts = torch.tensor([request.first_key for _, request, _ in packed])
        lengths = torch.tensor([num_keys for _, _, num_keys in packed])
        slots = paged_slots(block_table[rows], starts, lengths, self.block_size)
        return Gather(slots, [request for _, request, _ in packed])


def _shared_window(vllm_config: VllmConfig, layer_names: list[str]) -> int | None:
    """The sliding window of these layers, in tokens, None if any of them sees everything.

    A group may hold windowed and full layers when vLLM's hybrid KV cache manager is off.
    """
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
    windows = {layer.sliding_window for layer in layers.values()}
    return windows.pop() if len(windows) == 1 else None
