"""States out of a pool and back: in torch, and as the CUDA kernels are told to."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kda_plugin.kernels import loader, states

SOURCE = (Path(loader.__file__).parents[2] / "csrc" / "kda_states.cu").read_text(encoding="utf-8")
MEMBERS = re.findall(r"(\w+);", SOURCE.partition("struct Args {")[2].partition("}")[0])


class FakeKernel:
    """Does what csrc/kda_states.cu does, on the CPU's memory."""

    def prepare(
        self, entry: str, blocks: int, threads: int, num_pointers: int, constants: Sequence[int], *, comes_early: bool
    ) -> Any:
        def launch(*pointers: int) -> None:
            assert len(pointers) == num_pointers
            a = SimpleNamespace(**dict(zip(MEMBERS, (*pointers, *constants), strict=True)))
            part = threads * 4
            assert a.row_vectors <= a.parts * part < a.row_vectors + part
            for sequence in range(blocks // a.parts):
                index: Any = ctypes.c_int64 if a.rows_are_64_bit else ctypes.c_int32
                row = (index * (sequence + 1)).from_address(a.rows)[sequence]
                state, size = a.states + sequence * a.row_vectors * 16, a.row_vectors * 16
                there = 0 <= row < a.num_rows
                if entry == "scatter_states":
                    if there:
                        ctypes.memmove(a.pool + row * a.row_stride * 16, state, size)
                elif there and (ctypes.c_bool * (sequence + 1)).from_address(a.has_state)[sequence]:
                    ctypes.memmove(state, a.pool + row * a.row_stride * 16, size)
                else:
                    ctypes.memset(state, 0, size)

        return SimpleNamespace(of_this_thread=lambda: launch)


def by_kernel(dense: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor) -> states.Mover:
    row_stride, row_bytes = pool.stride(0) * pool.itemsize, dense[0].numel() * dense.itemsize
    kernel: Any = FakeKernel()
    return states._by_kernel(kernel, len(rows), rows.dtype == torch.int64, len(pool), row_stride, row_bytes)


@pytest.mark.parametrize("make", [states.mover, by_kernel], ids=["torch", "kernel"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [4, 16, 128])
def test_moves_the_rows(make: Callable[..., states.Mover], index: torch.dtype, dtype: torch.dtype, dim: int) -> None:
    pages = torch.randn(5, 3 * dim * dim + 24).to(dtype)
    pool = pages[:, 8 : 8 + 3 * dim * dim].unflatten(1, (3, dim, dim))
    rows, has_state = torch.tensor([3, 0, 4], dtype=index), torch.tensor([True, False, True])
    pool[0] = float("nan")
    before = pages.clone()
    dense = torch.full((3, 3, dim, dim), float("nan"), dtype=dtype)
    mover = make(dense, pool, rows)
    mover.gather(dense, pool, rows, has_state)
    assert torch.equal(pages.nan_to_num(), before.nan_to_num())
    assert torch.equal(dense, torch.stack((pool[3], torch.zeros_like(pool[0]), pool[4])))
    dense += 1
    mover.scatter(dense, pool, rows)
    assert torch.equal(pool[rows.long()], dense)
    untouched = torch.ones_like(pages, dtype=torch.bool)
    untouched.view(5, -1)[rows.long(), 8 : 8 + 3 * dim * dim] = False
    assert torch.equal(pages[untouched], before[untouched])


def test_the_kernel_s_arguments_are_known() -> None:
    assert MEMBERS[: states._POINTERS] == ["states", "pool", "rows", "has_state"]
    assert f"kThreads = {states._THREADS};" in SOURCE
    assert f"kLoads = {states._LOADS};" in SOURCE
