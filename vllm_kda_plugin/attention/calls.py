"""Runs the calls of a step on fresh or gathered K and V; what is paged is the caller's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_kda_plugin.attention.stats import STATS
from vllm_kda_plugin.attention.steps import Call

Buffers = Callable[..., list[torch.Tensor]]
"""Of (shape, dtype) pairs the workspace makes tensors, all valid until it is asked again."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """A call, and all that the layers of a step share for it: the host makes it once a step."""

    call: Call
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    block_table: torch.Tensor | None = None
    first_keys: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    """What is gathered, in the workspace."""
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    partial: torch.Tensor | None = None
    """A part's result, in the workspace."""
    sums: tuple[torch.Tensor, ...] = ()
    """Two places for the log-sum-exp of the parts so far."""


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Attention of one layer on contiguous K and V.

    Args:
        flash: vLLM's ``flash_attn_varlen_func``.
        gather: ``gather_paged_kv``.
        merge: vLLM's ``merge_attn_states``.
        num_heads: of the queries.
        num_kv_heads: of K and V.
        options: of ``flash`` in every call, such as ``softmax_scale``.
        window: ``[left, right]`` as ``flash`` takes it, -1 for no limit.
        sinks: ``[num_heads]`` or None; enters exactly one part of a merged result.
        alibi_slopes: ``[num_heads]`` or None.
    """

    flash: Callable[..., Any]
    gather: Callable[..., None]
    merge: Callable[..., None]
    num_heads: int
    num_kv_heads: int
    options: dict[str, Any]
    window: list[int]
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None

    def prepare(
        self,
        calls: Sequence[Call],
        numbers: torch.Tensor,
        block_table: torch.Tensor,
        head_size: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        buffers: Buffers,
    ) -> list[Ready]:
        """What the layers of a step share; the workspace's slices stay theirs until the step has run.

        Args:
            calls: the parts of one request follow each other, part 0 first; none is paged.
            numbers: int32, those of the step, on the device.
            block_table: int32 ``[requests, blocks]``.
            head_size: of K and of V.
            dtype: of the queries.
            out_dtype: of the results.
            buffers: of the workspace.
        """
        made = []
        for call in calls:
            shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
            if call.part is not None:
                # Always asked for, and first: the sums of the parts so far stay where they are.
                rows = call.tokens.stop - call.tokens.start
                shapes += [((self.num_heads, rows), torch.float32)] * 2
                shapes.append(((rows, self.num_heads, head_size), out_dtype))
            ready = Ready(call, numbers[call.cu_queries], numbers[call.cu_keys])
            if call.way == "gather":
                kv_heads = self.num_kv_heads if call.kv_heads is None else call.kv_heads.stop - call.kv_heads.start
                shapes.append(((call.num_keys, kv_heads, 2 * head_size), dtype))
            slices = buffers(*shapes) if shapes else []
            if call.part is not None:
                ready = dataclasses.replace(ready, sums=tuple(slices[:2]), partial=slices[2])
            if call.way == "gather":
                keys, values = slices[-1].split(head_size, dim=-1)
                ready = dataclasses.replace(
                    ready,
                    block_table=block_table[call.requests],
                    first_keys=numbers[call.first_keys],
                    packed=slices[-1],
                    keys=keys,
                    values=values,
                )
            made.append(ready)
        return made

    def run(
        self,
        calls: Sequence[Ready],
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: torch.Tensor,
        out: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend and write the rows of ``out`` that belong to the calls.

        Args:
            calls: of :meth:`prepare`.
            query: ``[tokens, num_heads, head_size]``, 16-bit.
            key: ``[tokens, num_kv_heads, head_size]``, this step's; None if no call is fresh.
            value: like ``key``.
            cache: ``[num_blocks, block_size, num_kv_heads, 2 * head_size]``, K then V in the last dimension; already
                holds this step's.
            out: like ``query``.
            k_scale: float32 ``[1]`` or ``[num_kv_heads]``, by which an fp8 cache is multiplied; None for a 16-bit one.
            v_scale: likewise.
        """
        sums: torch.Tensor | None = None
        for ready in calls:
            call, part = ready.call, ready.call.part
            queries, result, sinks, alibi_slopes = query, out, self.sinks, self.alibi_slopes
            if call.tokens.stop - call.tokens.start != len(query):
                queries, result = query[call.tokens], out[call.tokens]
            if call.kv_heads is not None:
                group = self.num_heads // self.num_kv_heads
                heads = slice(call.kv_heads.start * group, call.kv_heads.stop * group)
                queries, result = queries[:, heads], result[:, heads]
                sinks, alibi_slopes = (None if given is None else given[heads] for given in (sinks, alibi_slopes))
            if ready.packed is not None:
                self._gather(ready, cache, k_scale, v_scale)
                keys, values = ready.keys, ready.values
            else:
                STATS.fresh_calls += 1
                assert key is not None
                assert value is not None
                keys, values = key, value
                if call.tokens.stop - call.tokens.start != len(key):
                    keys, values = key[call.tokens], value[call.tokens]
            context = part is not None and part > 0
            attended = self.flash(
                q=queries,
                k=keys,
                v=values,
                out=ready.partial if context else result,
                cu_seqlens_q=ready.cu_queries,
                cu_seqlens_k=ready.cu_keys,
                max_seqlen_q=call.max_query,
                max_seqlen_k=call.max_keys,
                causal=not context,
                window_size=self.window,
                return_softmax_lse=part is not None,
                s_aux=None if context else sinks,
                alibi_slopes=alibi_slopes,
                **self.options,
            )
            if part == 0:
                sums = attended[1]
            elif part is not None:
                assert sums is not None
                # A sum is read by many threads: the new ones go to the place that the last merge did not write.
                merged = ready.sums[part % 2]
                self.merge(result, ready.partial, attended[1], result, sums, merged)
                sums = merged

    def _gather(
        self, ready: Ready, cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
    ) -> None:
        heads, packed = ready.call.kv_heads, ready.packed
        assert packed is not None
        if heads is not None:
            cache = cache[:, :, heads]
            k_scale, v_scale = (
                scale if scale is None or len(scale) == 1 else scale[heads] for scale in (k_scale, v_scale)
            )
        self.gather(
            packed,
            None,
            cache,
            None,
            ready.block_table,
            ready.cu_keys,
            ready.first_keys,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        STATS.gather_calls += 1
        STATS.gathers += 1
        STATS.gathered_tokens += ready.call.num_keys
        STATS.gathered_bytes += packed.nbytes
