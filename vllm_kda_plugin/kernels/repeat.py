"""Whether a call is like the one before: asked in C++, in a fourth of the time that looking at each tensor takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

GUARDED_TORCH = ("2.11.", "2.13.")
"""Versions whose guards, no public interface, are known to work."""


def never(*_: object) -> bool:
    """No call is like the one before."""
    return False


def same_forms(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Says of as many tensors whether they have the shapes, strides, dtypes and devices of these.

    In a torch that is not known the answer is always no.
    """
    if not torch.__version__.startswith(GUARDED_TORCH):
        return never
    from torch._C._dynamo.guards import TensorGuards

    check: Callable[..., bool] = TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check
