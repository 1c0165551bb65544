"""The short convolution in torch against a loop over tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from vllm_kda_plugin.kda.short_conv import short_conv

CHANNELS, WIDTH = 6, 4


def slow(x: torch.Tensor, weight: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: ``[T, C]`` and ``[C, W - 1]``."""
    out = torch.zeros_like(x)
    for t, token in enumerate(x):
        window = torch.cat((past, token[:, None]), -1)
        out[t] = F.silu((window * weight).sum(-1))
        past = window[:, 1:]
    return out, past


@pytest.mark.parametrize("lens", [[5], [1, 1, 1], [0, 7, 1, 0, 2, 3], [0], []])
@pytest.mark.parametrize("layout", ["channels first", "tokens first"])
def test_every_sequence_goes_on_from_its_past(lens: list[int], layout: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(sum(lens), CHANNELS), torch.randn(CHANNELS, WIDTH)
    pool = torch.randn(9, CHANNELS, WIDTH - 1)
    if layout == "tokens first":
        pool = pool.mT.contiguous().mT
    before = pool.clone()
    rows = torch.tensor([7, 2, 5, 0, 3, 8][: len(lens)]).int()
    known = torch.tensor([True, False, True, True, False, True][: len(lens)], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0).int()
    out = short_conv(x, weight, pool, rows, known, cu_seqlens)
    for row, has_past, (start, end) in zip(rows.tolist(), known, itertools.pairwise(cu_seqlens.tolist()), strict=True):
        past = before[row] * has_past
        wanted, after = slow(x[start:end], weight, past)
        torch.testing.assert_close(out[start:end], wanted)
        torch.testing.assert_close(pool[row], after, rtol=0, atol=0)
    others = [row for row in range(9) if row not in rows.tolist()]
    assert torch.equal(pool[others], before[others])


def test_narrow_inputs_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, CHANNELS).bfloat16(), torch.randn(CHANNELS, WIDTH)
    pool = torch.zeros(1, CHANNELS, WIDTH - 1).bfloat16()
    row = torch.zeros(1).int()
    out = short_conv(x, weight, pool, row, None, torch.tensor([0, 20]))
    wanted, _ = slow(x.float(), weight, torch.zeros(CHANNELS, WIDTH - 1))
    assert torch.equal(out, wanted.bfloat16()) or (out.float() - wanted).abs().max() < 0.02
