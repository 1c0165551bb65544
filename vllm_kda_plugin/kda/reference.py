"""Kimi Delta Attention in torch, on any device: the oracle of every kernel (float64) and the CPU's path (float32).

Each head keeps a state S ``[V, K]``, a linear map from keys to values. A token with query q, key k, value v, a log
decay g for every key channel and a learning rate beta turns it into::

    S <- S diag(exp(g))
    S <- S + beta (v - S k) k^T
    out = S q

as in the Kimi Linear report (arXiv 2510.26692) and in vLLM's layers. :func:`recurrence` is that loop,
:func:`chunked` the same in matrix products over chunks of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_kda_plugin.kernels.checks import refused

_INDEX_DTYPES = (torch.int32, torch.int64)
_NORM_EPSILON = 1e-6
_WIDTHS = (1, 8, 64)  # Tokens of a chunk, powers of two. A sequence has chunks of the least width that holds it, or 64.
_WINDOW = 1 << 13  # Tokens times heads whose factors are made at once: as many as stay in a CPU's cache.


class Result(NamedTuple):
    """What a call returns, all of it in the dtype computed in.

    Attributes:
        out: ``[1, T, H, V]``; zero from token ``cu_seqlens[-1]`` on.
        final_state: ``[N, H, V, K]`` after the last token of each sequence.
        checkpoint_state: ``[N, H, V, K]`` after ``checkpoint_offsets`` tokens of each sequence, None if not asked for.
    """

    out: torch.Tensor
    final_state: torch.Tensor
    checkpoint_state: torch.Tensor | None


_Chunk = tuple[int, int]  # First token, and number of tokens, at least 1.


def log_decay(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Log decay of every token, head and key channel, 0 or less, from a layer's raw gate logits.

    With ``x = g + dt_bias`` and ``A = exp(A_log)`` the bounded gate (Kimi K3, GLM-5.3-Flash, Bailing V3) is
    ``lower_bound * sigmoid(A x)``, the softplus gate (Kimi-Linear) ``-A softplus(x)``, where softplus is the identity
    above 20 as in vLLM's kernels. They are different functions: a clamped softplus gate is not the bounded one.

    Args:
        g: ``[..., H, K]`` of any float dtype.
        A_log: ``[H]`` or ``[1, 1, H, 1]``.
        dt_bias: ``[H * K]`` or ``[H, K]``.
        lower_bound: the most a token can decay, in nats, below 0; None for the softplus gate.
        dtype: torch.float32 or torch.float64, computed in and returned.

    Returns:
        ``[..., H, K]``.
    """
    x = g.to(dtype) + dt_bias.to(dtype).reshape(g.shape[-2:])
    rate = A_log.to(dtype).reshape(g.shape[-2], 1).exp()
    if lower_bound is None:
        return -rate * F.softplus(x, threshold=20.0)
    return lower_bound * torch.sigmoid(rate * x)


@torch.no_grad()
def recurrence(
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
    *,
    checkpoint_offsets: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Kimi Delta Attention token after token, all sequences side by side.

    Args:
        q: ``[1, T, H, K]`` of any float dtype, as all inputs. Divided by its norm here, then by ``sqrt(K)``.
        k: ``[1, T, H, K]``. Divided by its norm here.
        v: ``[1, T, H, V]``.
        g: ``[1, T, H, K]`` raw gate logits, see :func:`log_decay`.
        beta: ``[1, T, H]`` raw logits; the learning rate is their sigmoid.
        A_log: ``[H]`` or ``[1, 1, H, 1]``.
        dt_bias: ``[H * K]`` or ``[H, K]``.
        lower_bound: of the bounded gate, below 0; None for the softplus gate.
        initial_state: ``[N, H, V, K]``, or None for zeros. It is only read.
        cu_seqlens: ``[N + 1]`` int32 or int64. Sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n + 1] - 1``;
            it may be empty and keeps its state then. Tokens from ``cu_seqlens[-1]`` on are padding and never read.
        checkpoint_offsets: ``[N]`` int32 or int64, tokens of each sequence after which to return its state too, from
            0 (its initial state) to its length: what vLLM's prefix cache asks of a prefill. Any number is allowed.
        dtype: torch.float32 or torch.float64, computed in and returned.

    Returns:
        Output, final state and checkpoint state. On CUDA the call synchronises, to read ``cu_seqlens``.

    Raises:
        ValueError: an argument of a wrong shape or dtype, ``cu_seqlens`` or ``checkpoint_offsets`` out of range.
    """
    call = _Call(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, checkpoint_offsets, dtype)
    starts, lens, offsets = call.sequences()
    # Longest first, so that the sequences that still run at any token are the first few.
    order = sorted(range(len(lens)), key=lambda n: -lens[n])
    first = torch.tensor([starts[n] for n in order], device=q.device)
    out, final_state, checkpoint_state = call.results()
    state = final_state[order]
    q, k, v, g, beta = call.activated(slice(sum(lens)))
    decay = g.exp()
    for token in range(max(lens, default=0)):
        running = sum(length > token for length in lens)
        at = first[:running] + token
        key, s = k[at].unsqueeze(-1), state[:running]
        s *= decay[at].unsqueeze(-2)
        error = v[at].unsqueeze(-1) - s @ key
        s += beta[at][..., None, None] * error @ key.mT
        out[0, at] = (s @ q[at].unsqueeze(-1)).squeeze(-1)
        for rank, n in enumerate(order):
            if checkpoint_state is not None and offsets[n] == token + 1:
                checkpoint_state[n] = state[rank]
    final_state[order] = state
    return Result(out, final_state, checkpoint_state)


@torch.no_grad()
def chunked(
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
    *,
    checkpoint_offsets: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Kimi Delta Attention in matrix products over chunks of tokens. Arguments, results, errors of :func:`recurrence`.

    In a chunk, with D(i, j) the decay of channel c from token j to token i, or from its start, or to its end::

        L[i, j] = beta_i sum_c k_i k_j D(i, j)    j < i
        M[i, j] =        sum_c q_i k_j D(i, j)    j <= i
        U = (I + L)^-1 beta (V - (k D(i, start)) S^T)
        out = (q D(i, start)) S^T + M U
        S^T <- D(end, start) S^T + (k D(end, j))^T U

    Decays are only multiplied, never divided, so every gate is exact: see :func:`_factors`. The system of I + L is
    solved by substitution.
    """
    call = _Call(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, checkpoint_offsets, dtype)
    starts, lens, offsets = call.sequences()
    result = call.results()
    alike: dict[int, dict[int, list[_Chunk]]] = {width: {} for width in _WIDTHS}
    for n, (start, length, offset) in enumerate(zip(starts, lens, offsets, strict=True)):
        width = next((width for width in _WIDTHS if width >= length), _WIDTHS[-1])
        # A chunk ends at the checkpoint.
        alike[width][n] = _chunks(start, offset, width) + _chunks(start + offset, length - offset, width)
    for width, chunks in alike.items():
        if chunks:
            _run_chunks(call, chunks, width, offsets, result)
    return result


def _run_chunks(call: _Call, chunks: dict[int, list[_Chunk]], width: int, offsets: list[int], result: Result) -> None:
    """Write the results of some sequences: the chunks of each, of at most ``width`` tokens, by its number."""
    # The sequences of most chunks first, so that those that still run at any step are the first few.
    order = sorted(chunks, key=lambda n: -len(chunks[n]))
    steps = [[chunks[n][i] for n in order if i < len(chunks[n])] for i in range(len(chunks[order[0]]))]
    checkpoint_steps = [-(-offsets[n] // width) for n in order]
    state = result.final_state[order].mT.contiguous()
    done = 0
    for window in _windows(steps, _WINDOW // (width * call.q.shape[2])):
        first, size = torch.tensor([chunk for step in window for chunk in step], device=state.device).T.unsqueeze(-1)
        row = torch.arange(width, device=state.device)
        # Rows past the end of a chunk repeat its last token, with no key and no decay: they leave the state as it is.
        tokens, real = first + row.minimum(size - 1), row < size
        q, k, v, g, beta = (x.transpose(1, 2) for x in call.activated(tokens))
        k, g = (x.where(real[:, None, :, None], 0.0) for x in (k, g))
        beta = beta.unsqueeze(-1)
        rows, keys_to_end, (mix, lower) = _factors(torch.stack((q, beta * k)), k, g)
        # Of v and of the state's reading both at once. `solve_triangular` takes the diagonal for ones here.
        update, reader = torch.linalg.solve_triangular(
            lower, torch.cat((beta * v, rows[1]), -1), upper=False, unitriangular=True
        ).split((v.shape[-1], k.shape[-1]), -1)
        update, readers = update.contiguous(), torch.cat((rows[0], reader), -2)
        # In logarithms, and rounded once a chunk: a state may outlive many thousand tokens.
        total = g.sum(-2).exp().unsqueeze(-1)
        outputs = torch.empty_like(update)
        end = 0
        for step in window:
            begin, end = end, end + len(step)
            s = state[: len(step)]
            outputs[begin:end], reading = (readers[begin:end] @ s).split(width, -2)
            update[begin:end] -= reading
            s *= total[begin:end]
            s += keys_to_end[begin:end].mT @ update[begin:end]
            done += 1
            for rank, n in enumerate(order):
                if result.checkpoint_state is not None and checkpoint_steps[rank] == done:
                    result.checkpoint_state[n] = state[rank].mT
        outputs += mix @ update
        result.out[0, tokens[real]] = outputs.transpose(1, 2)[real]
    result.final_state[order] = state.mT


def _factors(
    rows: torch.Tensor, keys: torch.Tensor, log_decays: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the rows of a chunk read from its start and from its keys, what its keys leave at its end.

    Blocks of one token are joined in pairs until one block is left. A row of the second block of a pair meets a key
    of the first with the decay from that key to the end of its block, times the decay from there to the row. Both are
    products of decays, never quotients: nothing overflows, and what underflows is as good as 0.

    Args:
        rows: ``[R, n, H, C, K]``, C a power of two.
        keys: ``[n, H, C, K]``.
        log_decays: ``[n, H, C, K]``, 0 or less.

    Returns:
        ``rows`` decayed from the chunk's start; ``keys`` decayed to its end; ``[R, n, H, C, C]`` products of each row
        with each key decayed to it, 0 where the key comes after the row.
    """
    to_row = log_decays.exp()  # From the start of the block to the row, the row's own decay included.
    to_end = torch.ones_like(to_row)  # From the key to the end of the block, the key's own decay not included.
    width = rows.shape[-2]
    products = rows.new_zeros((*rows.shape[:-1], width))
    products.diagonal(dim1=-2, dim2=-1).copy_((rows * keys).sum(-1))
    size = 1
    while size < width:
        pairs = (width // (2 * size), 2, size)
        first, second = to_row.unflatten(-2, pairs).unbind(-3)
        first_to_end = to_end.unflatten(-2, pairs)[..., 0, :, :]
        late = rows.unflatten(-2, pairs)[..., 1, :, :] * second
        early = keys.unflatten(-2, pairs)[..., 0, :, :] * first_to_end
        blocks = products.unflatten(-1, pairs).unflatten(-4, pairs)[..., 1, :, :, 0, :]
        blocks.diagonal(dim1=-4, dim2=-2).copy_((late @ early.mT).movedim(-3, -1))
        first_to_end *= second[..., -1:, :]
        second *= first[..., -1:, :]
        size *= 2
    return rows * to_row, keys * to_end, products


def _chunks(start: int, length: int, width: int) -> list[_Chunk]:
    return [(start + at, min(width, length - at)) for at in range(0, length, width)]


def _windows(steps: list[list[_Chunk]], most: int) -> Iterator[list[list[_Chunk]]]:
    """The steps in groups of at most so many chunks, or of one step."""
    window: list[list[_Chunk]] = []
    for step in steps:
        if window and sum(map(len, window)) + len(step) > most:
            yield window
            window = []
        window.append(step)
    if window:
        yield window


@dataclass(frozen=True)
class _Call:
    """The arguments of a call, checked, and what both forms need of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor
    checkpoint_offsets: torch.Tensor | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Check shapes and dtypes."""
        if self.q.dim() != 4 or self.q.shape[0] != 1:
            raise refused("q", f"has shape {list(self.q.shape)}", "[1, T, H, K]")
        _, num_tokens, num_heads, key_dim = self.q.shape
        if self.v.dim() != 4:
            raise refused("v", f"has shape {list(self.v.shape)}", f"[1, {num_tokens}, {num_heads}, V]")
        if self.cu_seqlens.dim() != 1 or len(self.cu_seqlens) == 0:
            raise refused("cu_seqlens", f"has shape {list(self.cu_seqlens.shape)}", "[N + 1]")
        num_sequences, value_dim = len(self.cu_seqlens) - 1, self.v.shape[3]
        for name, shapes in (
            ("k", [(1, num_tokens, num_heads, key_dim)]),
            ("v", [(1, num_tokens, num_heads, value_dim)]),
            ("g", [(1, num_tokens, num_heads, key_dim)]),
            ("beta", [(1, num_tokens, num_heads)]),
            ("A_log", [(num_heads,), (1, 1, num_heads, 1)]),
            ("dt_bias", [(num_heads * key_dim,), (num_heads, key_dim)]),
            ("initial_state", [(num_sequences, num_heads, value_dim, key_dim)]),
            ("checkpoint_offsets", [(num_sequences,)]),
        ):
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) not in shapes:
                allowed = " or ".join(str(list(shape)) for shape in shapes)
                raise refused(name, f"has shape {list(tensor.shape)}", allowed)
        for name, tensor in (("cu_seqlens", self.cu_seqlens), ("checkpoint_offsets", self.checkpoint_offsets)):
            if tensor is not None and tensor.dtype not in _INDEX_DTYPES:
                raise refused(name, f"is {tensor.dtype}", "torch.int32 or torch.int64")
        if self.lower_bound is not None and not -math.inf < self.lower_bound < 0:
            raise refused("lower_bound", f"is {self.lower_bound}", "finite and below 0, or None for the softplus gate")
        if self.dtype not in (torch.float32, torch.float64):
            raise refused("dtype", f"is {self.dtype}", "torch.float32 or torch.float64")

    def sequences(self) -> tuple[list[int], list[int], list[int]]:
        """First token, number of tokens and checkpoint offset (0 if not asked for) of each sequence."""
        bounds, num_tokens = self.cu_seqlens.tolist(), self.q.shape[1]
        lens = [end - start for start, end in itertools.pairwise(bounds)]
        if bounds[0] != 0 or min(lens, default=0) < 0 or bounds[-1] > num_tokens:
            raise refused("cu_seqlens", f"is {bounds}", f"ascending from 0 to at most the {num_tokens} tokens of q")
        offsets = [0] * len(lens) if self.checkpoint_offsets is None else self.checkpoint_offsets.tolist()
        if not all(0 <= offset <= length for offset, length in zip(offsets, lens, strict=True)):
            raise refused("checkpoint_offsets", f"is {offsets}", f"from 0 to the lengths {lens}")
        return bounds[:-1], lens, offsets

    def activated(self, tokens: torch.Tensor | slice) -> tuple[torch.Tensor, ...]:
        """Normalised q and k, v, log decay and learning rate of these tokens, ``[..., H, D]`` and ``[..., H]``."""
        q, k, v, beta = (x[0, tokens].to(self.dtype) for x in (self.q, self.k, self.v, self.beta))
        q, k = (x * (x.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt() for x in (q, k))
        g = log_decay(self.g[0, tokens], self.A_log, self.dt_bias, self.lower_bound, self.dtype)
        return q * q.shape[-1] ** -0.5, k, v, g, beta.sigmoid()

    def results(self) -> Result:
        """Output of zeros, and the initial state twice."""
        v, key_dim = self.v, self.q.shape[3]
        if self.initial_state is None:
            state = v.new_zeros((len(self.cu_seqlens) - 1, *v.shape[2:], key_dim), dtype=self.dtype)
        else:
            state = self.initial_state.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        checkpoint_state = None if self.checkpoint_offsets is None else state.clone()
        return Result(v.new_zeros(v.shape, dtype=self.dtype), state, checkpoint_state)
