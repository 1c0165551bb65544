"""Attention of one request on contiguous K and V, in torch."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

# Elements of the largest mask or logits tile: 16 MiB in float32. Longer queries are cut into tiles.
_TILE_ELEMENTS = 1 << 22
_MIN_WINDOW_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of one layer; see :meth:`__call__`.

    Args:
        scale: multiplies the logits.
        window: ``(left, right)`` keys that a query sees besides its own position, None for no limit.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``, 0 for none.
        alibi_slopes: float32 ``[num_heads]`` (https://arxiv.org/abs/2108.12409), None for none.
        sinks: ``[num_heads]``, one more logit in each row's softmax, with no value; None for none.
    """

    scale: float
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        context: int,
        first_key: int = 0,
        causal: bool = True,
    ) -> None:
        """Attend and write ``out``.

        Args:
            query: ``[num_queries, num_heads, head_size]``; row 0 is at position ``context`` of the sequence.
            key: ``[num_keys, num_kv_heads, head_size]``; row 0 is at position ``first_key``.
            value: like ``key``; both may be strided, with last stride 1.
            out: like ``query``, written whole; zeros where a query sees no key.
            context: position of the first query.
            first_key: position of the first key.
            causal: whether a query sees only keys up to its own position.
        """
        left, right = self.window
        if causal:
            right = 0 if right is None else min(right, 0)
        end = first_key + key.shape[0]
        # Rows before and after these see no key, because of the window.
        seeing_first = 0 if right is None else max(0, first_key - right - context)
        seeing_end = query.shape[0] if left is None else min(query.shape[0], end + left - context)
        if end == first_key or seeing_first >= seeing_end:
            out.zero_()
            return
        out[:seeing_first].zero_()
        out[seeing_end:].zero_()
        # Top-left and bottom-right alignment agree here, so the kernel can be causal by itself.
        square = causal and context == first_key and key.shape[0] == query.shape[0]
        if square and left is None and not self._needs_logits and self.alibi_slopes is None:
            self._sdpa(query, key, value, out, mask=None, is_causal=True)
            return
        heads = query.shape[1] if self._needs_logits or self.alibi_slopes is not None else 1
        rows = max(1, _TILE_ELEMENTS // (heads * key.shape[0]))
        if left is not None:  # a tile sees its rows and the window before them: keep the former the smaller part
            rows = min(rows, max(_MIN_WINDOW_ROWS, left // 2))
        for row in range(seeing_first, seeing_end, rows):
            tile = slice(row, min(row + rows, seeing_end))
            first, last = context + tile.start, context + tile.stop - 1  # positions of the tile's queries
            low = first_key if left is None else max(first_key, first - left)
            high = end if right is None else min(end, last + right + 1)
            seen = slice(low - first_key, high - first_key)
            mask = None
            all_seen = (left is None or last - left <= low) and (right is None or first + right >= high - 1)
            if self.alibi_slopes is not None or not all_seen:
                mask = self._mask(torch.arange(first, last + 1), torch.arange(low, high), left, right)
            attend = self._explicit if self._needs_logits else self._sdpa
            attend(query[tile], key[seen], value[seen], out[tile], mask=mask)

    @property
    def _needs_logits(self) -> bool:
        """Whether the logits must be seen between the products, which torch's fused kernel cannot."""
        return self.soft_cap > 0 or self.sinks is not None

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor, left: int | None, right: int | None) -> torch.Tensor:
        """What is added to the logits: float32 ``[queries, keys]``, ``[heads, queries, keys]`` with ALiBi."""
        distance = keys[None, :] - queries[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left is not None:
            hidden |= distance < -left
        if right is not None:
            hidden |= distance > right
        if self.alibi_slopes is not None:
            bias = -self.alibi_slopes[:, None, None] * distance.abs()
            return bias.masked_fill_(hidden, float("-inf"))
        return torch.zeros_like(distance, dtype=torch.float32).masked_fill_(hidden, float("-inf"))

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        is_causal: bool = False,
    ) -> None:
        if mask is not None:
            mask = mask.to(query.dtype)
            mask = mask[None] if mask.dim() == 3 else mask
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=True,
        )
        out.copy_(attended[0].transpose(0, 1))

    def _explicit(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        mask: torch.Tensor | None,
    ) -> None:
        """Both products with the logits in float32 between them."""
        num_queries, num_heads, head_size = query.shape
        num_kv_heads = key.shape[1]
        # Query heads of one KV head are one matrix: [num_kv_heads, group * num_queries, head_size].
        grouped = query.view(num_queries, num_kv_heads, -1, head_size).permute(1, 2, 0, 3).float()
        keys = key.permute(1, 2, 0).float()
        logits = torch.matmul(grouped.flatten(1, 2), keys).view(num_heads, num_queries, -1).mul_(self.scale)
        if self.soft_cap > 0:
            logits = logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if mask is not None:
            logits += mask
        if self.sinks is not None:
            sinks = self.sinks.to(logits.dtype)[:, None, None].expand(num_heads, num_queries, 1)
            weights = torch.cat((logits, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = logits.softmax(dim=-1)
        attended = torch.matmul(weights.reshape(num_kv_heads, -1, key.shape[0]), value.transpose(0, 1).float())
        out.copy_(attended.view(num_kv_heads, -1, num_queries, head_size).permute(2, 0, 1, 3).flatten(1, 2))
