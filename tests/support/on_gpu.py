"""Calls of the gather on the GPU, compared with the CPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.paged import POISON, Call, copied, memory, mismatch, run


def check(call: Call, **options: Any) -> None:
    """Gather on the GPU and, with torch, on the CPU; every byte of the outputs' memory must be the same."""
    moved = copied(call, "cuda")
    run(moved, **options)
    run(without_bad_slots(call), impl="torch")
    assert not mismatch(copied(moved, "cpu"), call, "key", "value")


def without_bad_slots(call: Call) -> Call:
    """The call with -1 for every slot that is not in the cache."""
    if "slot_mapping" not in call:
        return call
    slots, cache = call["slot_mapping"], call["key_cache"]
    num_slots = cache.shape[0] * cache.shape[3 if cache.dim() == 5 else 1]
    return call | {"slot_mapping": slots.where((slots >= 0) & (slots < num_slots), -1)}


def some_bad(slots: torch.Tensor) -> torch.Tensor:
    """Every seventh slot replaced by one that is in no cache."""
    bad = [-1, -2, 2**31 - 1, -(2**31), 2**30] + [2**31, 2**40, 2**63 - 1, -(2**63)] * (slots.dtype == torch.int64)
    slots = slots.clone()
    places = slots[3::7]
    places.copy_(torch.tensor(bad, dtype=slots.dtype).repeat(len(places) // len(bad) + 1)[: len(places)])
    return slots


def untouched(tensor: torch.Tensor) -> bool:
    return bool((memory(tensor) == POISON).all())


def gpu_bytes(*shape: int) -> torch.Tensor:
    """Random bf16 bits made on the GPU."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda").view(torch.bfloat16)
