"""Calls of ``kda_prefill`` with random tensors, layouts that it refuses, and how that is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from vllm_kda_plugin.kda.prefill import kda_prefill, scratch_bytes
from vllm_kda_plugin.kda.providers import Provider
from vllm_kda_plugin.kda.reference import Result, chunked

WRITTEN = ("out", "final_state", "checkpoint_state", "initial_state", "workspace")
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound")
_SPARE_ROWS = 5  # of a pool

Args = dict[str, Any]


def arguments(
    provider: Provider,
    lens: Sequence[int],
    heads: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding: int = 0,
    lower_bound: float | None = -5.0,
    pool: bool = False,
    **changes: Any,
) -> Args:
    """A call of sequences of ``lens`` tokens, buffers full of sevens, a checkpoint inside the longest if it can be."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def sevens(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 7, dtype=dtype, device=device)

    tokens, sequences = sum(lens) + padding, len(lens)
    states = (sequences, heads, dim, dim)
    args: Args = {
        **{name: draw(1, tokens, heads, dim, dtype=dtype) for name in "qkvg"},
        "beta": draw(1, tokens, heads, dtype=dtype),
        "A_log": draw(heads),
        "dt_bias": draw(heads * dim),
        "lower_bound": lower_bound,
        "initial_state": draw(*states, dtype=state_dtype),
        "cu_seqlens": torch.tensor([0, *lens]).cumsum(0).int().to(device),
        "out": sevens(1, tokens, heads, dim, dtype=dtype),
        "final_state": sevens(*states, dtype=state_dtype),
        "provider": provider,
    }
    if provider.checkpoint_step:
        offsets = [length // 16 * 16 if length == max(lens) else 0 for length in lens]
        args["checkpoint_state"] = sevens(*states, dtype=state_dtype)
        args["checkpoint_offsets"] = torch.tensor(offsets).int().to(device)
    size = scratch_bytes(provider, tokens, sequences, heads, dim, dtype, state_dtype)
    args["workspace"] = sevens(size, dtype=torch.uint8)
    if pool:
        args["initial_state"] = draw(sequences + _SPARE_ROWS, heads, dim, dim, dtype=state_dtype)
        rows = torch.randperm(sequences + _SPARE_ROWS, generator=generator, device=device)
        args["state_indices"] = rows[:sequences].int()
        args["has_initial_state"] = (torch.arange(sequences) % 3 != 2).to(device)
    return args | changes


def expected(args: Args, initial_state: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> Result:
    """What the reference gives."""
    return chunked(
        *(args[name] for name in INPUTS),
        initial_state,
        args["cu_seqlens"],
        checkpoint_offsets=args.get("checkpoint_offsets"),
        dtype=dtype,
    )


def rows_of_pool(args: Args) -> torch.Tensor:
    """The initial states of a call with a pool; zeros of a sequence whose row is not in it."""
    pool, rows = args["initial_state"], args["state_indices"].long()
    known = args["has_initial_state"] & (rows >= 0) & (rows < len(pool))
    return pool[rows.where(known, 0)].masked_fill(~known[:, None, None, None], 0)


def twice(x: torch.Tensor) -> torch.Tensor:
    """Every second element of the last dimension."""
    return torch.stack((x, x), -1).flatten(-2)[..., ::2]


def batch_slice(x: torch.Tensor) -> torch.Tensor:
    """A slice of a buffer that was made for a batch of two: the case that looks contiguous, and is not."""
    return torch.cat((x, x), 1).expand(2, *[-1] * (x.dim() - 1)).contiguous()[:, : x.shape[1]]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sliced": twice,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else twice(x),
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "batch slice": lambda x: batch_slice(x) if x.dim() > 1 and len(x) == 1 else torch.cat((x, x), 0)[::2],
}
TENSORS = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "out", "final_state"),
    *("workspace", "checkpoint_state", "checkpoint_offsets"),
)
"""Arguments that are refused in any of these layouts."""


def refuses(args: Args, message: str) -> None:
    """The call is refused with the message, and has written nothing."""
    before = {name: args[name].clone() for name in WRITTEN if args.get(name) is not None}
    with pytest.raises(ValueError, match=message):
        kda_prefill(**args)
    for name, held in before.items():
        assert torch.equal(args[name], held), name
