"""Recurrent states of a batch, out of the engine's pool and back: a row of the pool for each sequence.

On an NVIDIA GPU the kernels of ``csrc/kda_states.cu`` do it, one launch each way; elsewhere, without CuPy and for rows
that are not made of whole 16-byte vectors, torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_kda_plugin.kernels import loader

KERNEL = "kda_states"
# As csrc/kda_states.cu has them.
_THREADS, _LOADS, _VECTOR = 256, 4, 16
_POINTERS = 4


class Mover(NamedTuple):
    """How the states of batches of one form are moved. No argument is checked again."""

    gather: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]
    """States, pool, rows, has_state: fills the states, with zeros where a sequence has none yet."""
    scatter: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
    """States, pool, rows: the reverse, of every sequence."""


def load(device: torch.device) -> None:
    """Load the kernels on a GPU, if they can be had: during the capture of a CUDA graph it is too late."""
    if device.type == "cuda":
        _kernel(torch.cuda.current_device() if device.index is None else device.index)


def mover(states: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor) -> Mover:
    """The fastest way for tensors of this form and alignment.

    Args:
        states: ``[N, ...]`` contiguous, N at least 1.
        pool: ``[P, ...]``, each row contiguous.
        rows: ``[N]`` int32 or int64 contiguous, no row twice.
    """
    row_bytes, row_stride = states[0].numel() * states.itemsize, pool.stride(0) * pool.itemsize
    vectors = not (states.data_ptr() | pool.data_ptr() | row_bytes | row_stride) % _VECTOR and row_bytes > 0
    kernel = _kernel(states.device.index) if states.is_cuda and vectors else None
    if kernel is None:
        return IN_TORCH
    return _by_kernel(kernel, len(rows), rows.dtype == torch.int64, len(pool), row_stride, row_bytes)


def _by_kernel(
    kernel: loader.Kernel, num_sequences: int, rows_are_64_bit: bool, num_rows: int, row_stride: int, row_bytes: int
) -> Mover:
    launches = _launches(kernel, num_sequences, rows_are_64_bit, num_rows, row_stride, row_bytes)
    gather_at, scatter_at = (launch.of_this_thread() for launch in launches)

    def gather(states: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, has_state: torch.Tensor) -> None:
        gather_at(states.data_ptr(), pool.data_ptr(), rows.data_ptr(), has_state.data_ptr())

    def scatter(states: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor) -> None:
        scatter_at(states.data_ptr(), pool.data_ptr(), rows.data_ptr(), 0)

    return Mover(gather, scatter)


@functools.lru_cache(maxsize=1024)
def _launches(
    kernel: loader.Kernel, num_sequences: int, rows_are_64_bit: bool, num_rows: int, row_stride: int, row_bytes: int
) -> list[loader.Launch]:
    """Of the gather and of the scatter."""
    row_vectors = row_bytes // _VECTOR
    parts = -(-row_vectors // (_THREADS * _LOADS))
    constants = int(rows_are_64_bit), num_rows, row_stride // _VECTOR, row_vectors, parts
    return [
        kernel.prepare(entry, num_sequences * parts, _THREADS, _POINTERS, constants, comes_early=True)
        for entry in loader.KERNELS[KERNEL]
    ]


def _gather_in_torch(
    states: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, has_state: torch.Tensor
) -> torch.Tensor:
    torch.index_select(pool, 0, rows, out=states)
    # Not multiplied: a recycled row may hold NaN.
    return states.masked_fill_(~has_state.view(-1, *[1] * (states.dim() - 1)), 0)


def _scatter_in_torch(states: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return pool.index_copy_(0, rows.long(), states)


IN_TORCH = Mover(_gather_in_torch, _scatter_in_torch)
"""Torch, for any tensors."""


@functools.cache
def _kernel(device: int) -> loader.Kernel | None:
    try:
        return loader.load(KERNEL, device)
    except loader.KernelUnavailable:
        return None
