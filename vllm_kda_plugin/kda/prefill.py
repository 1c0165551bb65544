"""One KDA prefill: every tensor checked, then the kernel, with all buffers given by the caller.

What was found about a call is remembered: the next one like it, such as that of the step's next layer, is only asked
for the forms of its tensors and for their alignment.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_kda_plugin.kda.providers import Call, Case, Provider
from vllm_kda_plugin.kernels import states
from vllm_kda_plugin.kernels.checks import debug_checks, refused
from vllm_kda_plugin.kernels.repeat import never, same_forms

_CHECK = debug_checks()
_INDEX_DTYPES = (torch.int32, torch.int64)
_ALIGNED = 256  # Bytes, of each part of the workspace.
_WORKSPACE_ALIGNED = 16  # Bytes, at least, of the workspace itself: any dtype can lie in it.


def scratch_bytes(
    provider: Provider,
    num_tokens: int,
    num_sequences: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> int:
    """Bytes of ``workspace`` with which :func:`kda_prefill` can run any call of these sizes.

    That is the kernel's own scratch, a dense copy of q, k, v and g if the kernel needs them dense, and the initial
    states gathered from a pool if the kernel does not read them there.
    """
    parts = [provider.scratch_bytes(num_tokens, num_sequences, num_heads, head_dim)]
    if provider.dense_inputs:
        parts += [num_tokens * num_heads * head_dim * dtype.itemsize] * 4
    if not provider.pools:
        parts.append(num_sequences * num_heads * head_dim * head_dim * state_dtype.itemsize)
    return sum(map(_round_up, parts))


@torch.no_grad()
def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    final_state: torch.Tensor | None,
    workspace: torch.Tensor,
    *,
    provider: Provider,
    checkpoint_state: torch.Tensor | None = None,
    checkpoint_offsets: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run Kimi Delta Attention over N sequences of T tokens in all; see ``kda/reference.py`` for the mathematics.

    In q, k, v, g and beta the distance from one token to the next is free, and for the kernel ``native`` the one from
    head to head; all else must be contiguous. Every other tensor must be contiguous.

    Args:
        q: ``[1, T, H, D]``, normalised here, as k.
        k: like q.
        v: like q.
        g: like q, raw gate logits.
        beta: ``[1, T, H]`` raw logits, dtype of q.
        A_log: float32 ``[H]`` or ``[1, 1, H, 1]``.
        dt_bias: float32 ``[H * D]`` or ``[H, D]``.
        lower_bound: of the bounded gate, below 0; None for the softplus gate.
        initial_state: ``[N, H, D, D]`` (values, keys), or None for zeros. With ``state_indices`` a pool
            ``[P, H, D, D]`` whose rows may lie apart; each sequence's row is read, then takes its final state.
        cu_seqlens: ``[N + 1]`` int32 or int64, first token of each sequence, from 0; a sequence may be empty. Tokens
            from ``cu_seqlens[-1]`` on are padding: never written in ``out``, and without effect if they are finite;
            if not, see ``FlashKdaProvider``.
        out: like q, written.
        final_state: ``[N, H, D, D]``, written; dtype of ``initial_state``. With a pool and a kernel that writes its
            rows itself, such as ``native``, it may be None.
        workspace: bytes (uint8), at least :func:`scratch_bytes`.
        provider: the kernel, see ``kda/providers.py``.
        checkpoint_state: ``[N, H, D, D]``, dtype of ``initial_state``, written: the state after ``checkpoint_offsets``
            tokens of each sequence. Unspecified where the offset is 0.
        checkpoint_offsets: ``[N]``, dtype of ``cu_seqlens``.
        state_indices: ``[N]`` int32 or int64, row in the pool of each sequence, no row twice but for row 0: no
            sequence owns that in vLLM, whose warm-up names it for all. On a GPU a negative one is none: its sequence
            starts from zeros, and leaves its state in ``final_state`` only, if anywhere.
        has_initial_state: ``[N]`` bool, with ``state_indices``: False for a sequence that starts from zeros.
        max_seqlen: no sequence has more tokens than this, for a better plan; None if the host does not know.

    Returns:
        ``out`` and ``final_state``.

    Raises:
        ValueError: naming the argument, what was found and what is allowed. Nothing has been written then. Values
            of index tensors on a GPU are looked at only under VLLM_KDA_CHECK=1.
    """
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | g.data_ptr()
    addresses |= dt_bias.data_ptr() | out.data_ptr() | workspace.data_ptr()
    optional = final_state, initial_state, checkpoint_state, checkpoint_offsets, state_indices, has_initial_state
    required = q, k, v, g, beta, A_log, dt_bias, cu_seqlens, out, workspace
    tensors: tuple[torch.Tensor, ...] = required
    given: list[object] = [provider, lower_bound]
    for tensor in optional:
        given.append(tensor is not None)
        if tensor is not None:
            tensors += (tensor,)
    if final_state is not None:
        addresses |= final_state.data_ptr()
    if initial_state is not None:
        addresses |= initial_state.data_ptr()
    if checkpoint_state is not None:
        addresses |= checkpoint_state.data_ptr()

    known, holds_for, plan = _LAST.call
    if given != known or addresses % plan.alignment or not holds_for(*tensors):
        plan = _check_all(_Arguments(*required, *optional), lower_bound, provider)
        _LAST.call = _NO_CALL if addresses % plan.alignment else _LastCall(given, same_forms(tensors), plan)
    if q.is_cpu or (_CHECK and not torch.cuda.is_current_stream_capturing()):
        _check_values(_Arguments(*required, *optional), provider, max_seqlen)

    pool = initial_state
    if plan.initial_state is not None:
        initial_state = plan.initial_state.of(workspace)
        plan.mover.gather(initial_state, pool, state_indices, has_initial_state)
    if plan.empty:
        if final_state is not None and len(final_state):
            final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    else:
        if plan.copied:
            q, k, v, g = (
                x if part is None else part.of(workspace).copy_(x)
                for x, part in zip((q, k, v, g), plan.copied, strict=True)
            )
        provider.run(
            Call(
                q,
                k,
                v,
                g,
                beta,
                A_log,
                dt_bias,
                lower_bound,
                initial_state,
                cu_seqlens,
                out,
                final_state,
                workspace[: plan.scratch_bytes],
                checkpoint_state,
                checkpoint_offsets,
                *((state_indices, has_initial_state) if plan.initial_state is None else (None, None)),
                max_seqlen,
            )
        )
    if plan.initial_state is not None and final_state is not None:
        plan.mover.scatter(final_state, pool, state_indices)
    return out, final_state


class _Arguments(NamedTuple):
    """The tensors of a call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    cu_seqlens: torch.Tensor
    out: torch.Tensor
    workspace: torch.Tensor
    final_state: torch.Tensor | None
    initial_state: torch.Tensor | None
    checkpoint_state: torch.Tensor | None
    checkpoint_offsets: torch.Tensor | None
    state_indices: torch.Tensor | None
    has_initial_state: torch.Tensor | None


class _Part(NamedTuple):
    """A tensor inside the workspace."""

    start: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, workspace: torch.Tensor) -> torch.Tensor:
        return workspace[self.start : self.end].view(self.dtype).view(self.shape)


class _Plan(NamedTuple):
    """What is the same in every call of one form."""

    alignment: int = 1
    """Bytes at which every tensor but the small ones starts."""
    empty: bool = True
    """There is nothing for a kernel to do."""
    scratch_bytes: int = 0
    """Of the workspace, from its start: the kernel's."""
    copied: tuple[_Part | None, ...] = ()
    """Where dense copies of q, k, v and g go; None for one that is dense, no parts at all if all are."""
    initial_state: _Part | None = None
    """Where the states of a pool go."""
    mover: states.Mover = states.IN_TORCH


class _LastCall(NamedTuple):
    """A call that was checked, so that the next one like it need not be."""

    given: list[object]
    """Its provider, its bound, and which optional tensors it had."""
    holds_for: Callable[..., bool]
    """Whether as many tensors have the forms of the last."""
    plan: _Plan


_NO_CALL = _LastCall([], never, _Plan())


class _Last(threading.local):
    call = _NO_CALL


_LAST = _Last()


def _check_all(a: _Arguments, lower_bound: float | None, provider: Provider) -> _Plan:
    """Refuse what is wrong with a call but for the values of its tensors; plan it."""
    q, cu_seqlens = a.q, a.cu_seqlens
    if q.dim() != 4 or q.shape[0] != 1 or q.shape[2] == 0 or q.shape[3] == 0:
        raise _unfit("q", q, "[1, T, H, D]")
    _, num_tokens, num_heads, head_dim = q.shape
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise _unfit("cu_seqlens", cu_seqlens, "[N + 1]")
    num_sequences = len(cu_seqlens) - 1
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise refused("lower_bound", f"is {lower_bound}", "finite and below 0, or None for the softplus gate")
    _together("checkpoint_state", a.checkpoint_state, "checkpoint_offsets", a.checkpoint_offsets)
    _together("state_indices", a.state_indices, "has_initial_state", a.has_initial_state)
    if a.state_indices is not None and a.initial_state is None:
        raise refused("initial_state", "is None", "the pool that state_indices points into")
    states_of = a.initial_state if a.final_state is None else a.final_state
    if states_of is None or (a.final_state is None and not (provider.pools and a.state_indices is not None)):
        allowed = "a tensor, but for kernels that write the rows of a pool themselves"
        raise refused("final_state", "is None", allowed)
    state_dtype = states_of.dtype
    if a.checkpoint_state is not None and not provider.checkpoint_step:
        raise refused("checkpoint_state", "was given", f"None: {provider.name} takes no checkpoints")

    tokens, per_head = (1, num_tokens, num_heads, head_dim), (1, num_tokens, num_heads)
    dense_states = (num_sequences, num_heads, head_dim, head_dim)
    floats, indices = (q.dtype,), (cu_seqlens.dtype,)
    align, strides = provider.alignment, ("tokens", "heads") if provider.strided_heads else ("tokens",)
    for name in "qkvg":
        align_input = 1 if provider.dense_inputs else align
        _check(name, getattr(a, name), q, floats, tokens, strides=strides, align=align_input)
    _check("beta", a.beta, q, floats, per_head, strides=strides)
    _check("A_log", a.A_log, q, (torch.float32,), (num_heads,), (1, 1, num_heads, 1))
    _check("dt_bias", a.dt_bias, q, (torch.float32,), (num_heads * head_dim,), (num_heads, head_dim), align=align)
    _check("cu_seqlens", cu_seqlens, q, _INDEX_DTYPES, (num_sequences + 1,))
    _check("out", a.out, q, floats, tokens, align=align)
    if a.final_state is not None:
        _check("final_state", a.final_state, q, (state_dtype,), dense_states, align=align)
    if a.initial_state is not None and a.state_indices is None:
        _check("initial_state", a.initial_state, q, (state_dtype,), dense_states, align=align)
    elif a.initial_state is not None and a.state_indices is not None and a.has_initial_state is not None:
        _check_pool(a.initial_state, q, state_dtype, dense_states, align if provider.pools else 1)
        _check("state_indices", a.state_indices, q, _INDEX_DTYPES, (num_sequences,))
        _check("has_initial_state", a.has_initial_state, q, (torch.bool,), (num_sequences,))
    if a.checkpoint_state is not None and a.checkpoint_offsets is not None:
        _check("checkpoint_state", a.checkpoint_state, q, (state_dtype,), dense_states, align=align)
        _check("checkpoint_offsets", a.checkpoint_offsets, q, indices, (num_sequences,))
    workspace_align = max(align, _WORKSPACE_ALIGNED)
    _check("workspace", a.workspace, q, (torch.uint8,), (a.workspace.numel(),), align=workspace_align)
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    reason = provider.why_not(Case(q.device.type, capability, head_dim, q.dtype, state_dtype, lower_bound))
    if reason:
        raise ValueError(f"{provider.name} cannot run this call: {reason}")
    need = scratch_bytes(provider, num_tokens, num_sequences, num_heads, head_dim, q.dtype, state_dtype)
    if a.workspace.numel() < need:
        raise refused("workspace", f"has {a.workspace.numel()} bytes", f"at least {need} for {provider.name}")

    parts = _Parts()
    scratch = parts.take((provider.scratch_bytes(num_tokens, num_sequences, num_heads, head_dim),), torch.uint8)
    copied: tuple[_Part | None, ...] = ()
    if provider.dense_inputs:
        copied = tuple(
            None if x.is_contiguous() and x.data_ptr() % align == 0 else parts.take(tokens, x.dtype)
            for x in (q, a.k, a.v, a.g)
        )
    initial_state, mover = None, states.IN_TORCH
    if a.initial_state is not None and a.state_indices is not None and num_sequences and not provider.pools:
        initial_state = parts.take(dense_states, state_dtype)
        mover = states.mover(initial_state.of(a.workspace), a.initial_state, a.state_indices)
    return _Plan(
        alignment=workspace_align,
        empty=num_sequences == 0 or (num_tokens == 0 and not provider.pools),  # whose rows are to be looked after
        scratch_bytes=scratch.end,
        copied=copied if any(copied) else (),
        initial_state=initial_state,
        mover=mover,
    )


class _Parts:
    """Hands out the workspace, part by part."""

    def __init__(self) -> None:
        self.used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Part:
        start = self.used
        size = math.prod(shape) * dtype.itemsize
        self.used += _round_up(size)
        return _Part(start, start + size, dtype, shape)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _check(
    name: str,
    tensor: torch.Tensor,
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    *shapes: tuple[int, ...],
    strides: tuple[str, ...] = (),
    align: int = 1,
) -> None:
    """Device, dtype, shape, layout and alignment of one argument."""
    if tensor.device != like.device:
        raise refused(name, f"is on {tensor.device}", f"on {like.device} as q is")
    if tensor.dtype not in dtypes:
        raise refused(name, f"is {tensor.dtype}", " or ".join(map(str, dtypes)))
    if tuple(tensor.shape) not in shapes:
        raise _unfit(name, tensor, " or ".join(str(list(shape)) for shape in shapes))
    if not (tensor.is_contiguous() or (strides and _lies_apart(tensor, "heads" in strides))):
        but = f" but for the distance between {' and between '.join(strides)}" if strides else ""
        raise _unfit(name, tensor, f"contiguous{but}")
    if tensor.data_ptr() % align:
        raise refused(name, f"starts at address {tensor.data_ptr():#x}", f"at a multiple of {align} bytes")
    for dim, what in enumerate(strides, 1):
        apart = tensor.stride(dim) * tensor.itemsize
        if tensor.shape[dim] > 1 and apart % align:
            raise refused(name, f"has {what} {apart} bytes apart", f"a multiple of {align} bytes apart")


def _check_pool(
    pool: torch.Tensor, like: torch.Tensor, dtype: torch.dtype, states: tuple[int, ...], align: int
) -> None:
    if pool.device != like.device:
        raise refused("initial_state", f"is on {pool.device}", f"on {like.device} as q is")
    if pool.dtype != dtype:
        raise refused("initial_state", f"is {pool.dtype}", f"{dtype} as final_state is")
    size = math.prod(states[1:])
    if pool.dim() != 4 or tuple(pool.shape[1:]) != states[1:]:
        raise _unfit("initial_state", pool, f"a pool [P, {', '.join(map(str, states[1:]))}]")
    if not pool[:1].is_contiguous() or (pool.shape[0] > 1 and pool.stride(0) < size):
        raise _unfit("initial_state", pool, "contiguous but for the distance between rows of the pool")
    if pool.data_ptr() % align or (pool.stride(0) * pool.itemsize) % align:
        found = f"starts at address {pool.data_ptr():#x} with rows {pool.stride(0) * pool.itemsize} bytes apart"
        raise refused("initial_state", found, f"both multiples of {align} bytes")


def _check_values(a: _Arguments, provider: Provider, max_seqlen: int | None) -> None:
    """Refuse wrong values of index tensors, and memory that is written and used for something else too.

    On a GPU this synchronises.
    """
    bounds, num_tokens = a.cu_seqlens.tolist(), a.q.shape[1]
    lens = [end - start for start, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or min(lens, default=0) < 0 or bounds[-1] > num_tokens:
        raise refused("cu_seqlens", f"is {bounds}", f"ascending from 0 to at most the {num_tokens} tokens of q")
    if max_seqlen is not None and max(lens, default=0) > max_seqlen:
        raise refused("max_seqlen", f"is {max_seqlen}", f"at least {max(lens)}, as the longest sequence")
    checkpoint_step = provider.checkpoint_step
    offsets = [] if a.checkpoint_offsets is None else a.checkpoint_offsets.tolist()
    if any(not 0 <= at <= length or at % checkpoint_step for at, length in zip(offsets, lens, strict=False)):
        raise refused(
            "checkpoint_offsets", f"is {offsets}", f"multiples of {checkpoint_step} from 0 to the lengths {lens}"
        )
    if a.state_indices is not None and a.initial_state is not None:
        rows, num_rows = a.state_indices.tolist(), len(a.initial_state)
        there = [row for row in rows if row >= 0 or not a.q.is_cuda]
        owned = [row for row in there if row != 0]
        if len(set(owned)) < len(owned) or not all(0 <= row < num_rows for row in there):
            raise refused("state_indices", f"is {rows}", f"different rows from 0 to {num_rows - 1}")
    ends = {name: _ends(x) for name, x in a._asdict().items() if x is not None and x.numel()}
    for name in ("out", "final_state", "workspace", "checkpoint_state"):
        for other, (start, end) in ends.items():
            if name in ends and other != name and start < ends[name][1] and ends[name][0] < end:
                raise refused(name, f"shares memory with {other}", "memory of its own")


def _ends(x: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor, and the first after it."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + reach * x.itemsize


def _lies_apart(tensor: torch.Tensor, heads: bool) -> bool:
    """Whether all but the distance between tokens, which must not be less than a token, is contiguous.

    Args:
        tensor: ``[1, T, H, ...]``
        heads: whether the distance between heads is free, and with it the other.
    """
    if heads:
        return tensor[:, :1, :1].is_contiguous()
    token = tensor[:, :1]
    return token.is_contiguous() and (tensor.shape[1] < 2 or tensor.stride(1) >= token.numel())


def _together(name: str, tensor: torch.Tensor | None, other: str, other_tensor: torch.Tensor | None) -> None:
    if (tensor is None) != (other_tensor is None):
        missing, given = (name, other) if tensor is None else (other, name)
        raise refused(missing, "is None", f"given together with {given}")


def _unfit(name: str, tensor: torch.Tensor, allowed: str) -> ValueError:
    return refused(name, f"has shape {list(tensor.shape)} and strides {list(tensor.stride())}", allowed)
