"""The torch provider on inputs that break kernels: finite, and near to float64."""

from __future__ import annotations

import pytest
import torch

from tests.support.kda_calls import arguments
from tests.support.kda_numerics import IDS, KINDS, Numbers, check, check_neighbours, check_padding, claims
from vllm_kda_plugin.kda.providers import PROVIDERS

TORCH = PROVIDERS["torch"]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-3}  # bfloat16 itself rounds by up to 2^-9


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("numbers", "lower_bound"), KINDS, ids=IDS)
def test_near_to_float64(numbers: Numbers, lower_bound: float | None, dtype: torch.dtype) -> None:
    args = arguments(TORCH, numbers.lens, 2, 128, dtype=dtype, lower_bound=lower_bound)
    numbers.change(args)
    assert claims(TORCH, args)
    check(args, TOLERANCES[dtype])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 96])
def test_head_sizes_and_pools(dim: int, state_dtype: torch.dtype) -> None:
    args = arguments(TORCH, (17, 0, 64), 3, dim, state_dtype=state_dtype, pool=True, padding=5)
    check(args, 1e-4 if state_dtype == torch.float32 else 4e-3)


def test_neighbours_and_chunks_do_not_matter() -> None:
    check_neighbours(TORCH, 1e-5)


def test_padding_does_not_matter() -> None:
    check_padding(TORCH)
