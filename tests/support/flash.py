"""FlashAttention's varlen call, and the merging of its results, in torch: as vLLM documents them, in float32."""

from __future__ import annotations

from typing import Any

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence, the last query beside the last key: ``[queries, heads, head_size]`` and the log of the sums.

    All float32. The log-sum-exp is ``[heads, queries]``, with the sink, -inf where nothing is seen.
    """
    num_queries, num_heads, _ = query.shape
    key, value = (tensor.float().repeat_interleave(num_heads // tensor.shape[1], dim=1) for tensor in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    distance = torch.arange(len(key)) - (torch.arange(num_queries)[:, None] + len(key) - num_queries)
    if alibi_slopes is not None:
        logits = logits - alibi_slopes[:, None, None] * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    left, right = window
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, num_queries, 1)], dim=-1)
        value = torch.cat([value, torch.zeros_like(value[:1])])
    sums = logits.logsumexp(-1)
    weights = (logits - sums[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value), sums


def flash_attn_varlen_func(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax_lse: bool,
    s_aux: torch.Tensor | None,
    fa_version: int,
    num_splits: int,
) -> Any:
    """vLLM's function of this name without a page table; refuses what the real one would read out of bounds."""
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert queries[0] == keys[0] == 0
    assert queries[-1] == len(q) == len(out)
    assert keys[-1] == len(k) == len(v), "rows past the last sequence may hold NaN, which 0 does not hide"
    assert len(queries) == len(keys)
    assert max(cu_seqlens_q.diff().tolist()) == max_seqlen_q
    assert max(cu_seqlens_k.diff().tolist()) == max_seqlen_k
    assert k.stride(-1) == v.stride(-1) == q.stride(-1) == out.stride(-1) == 1
    assert fa_version != 3 or alibi_slopes is None
    assert fa_version != 2 or s_aux is None
    sums = torch.full((q.shape[1], len(q)), torch.nan)
    for i in range(len(queries) - 1):
        rows, cols = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        out[rows], sums[:, rows] = attention(
            q[rows],
            k[cols],
            v[cols],
            scale=softmax_scale,
            causal=causal,
            window=(window_size[0], window_size[1]),
            soft_cap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=s_aux,
        )
    return (out, sums) if return_softmax_lse else out


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor,
) -> None:
    """vLLM's function of this name. The new sums must not be where they are still read."""
    assert output_lse.data_ptr() not in (prefix_lse.data_ptr(), suffix_lse.data_ptr())
    assert prefix_lse.data_ptr() != suffix_lse.data_ptr()
    sums = torch.logaddexp(prefix_lse, suffix_lse)
    weights = [(part - sums).exp().T[..., None] for part in (prefix_lse, suffix_lse)]
    output.copy_(prefix_output.float() * weights[0] + suffix_output.float() * weights[1])
    output_lse.copy_(sums)
