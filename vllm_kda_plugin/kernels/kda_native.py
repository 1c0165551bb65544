"""Our own KDA prefill for Hopper, ``csrc/kda_prefill_sm90.cu``: how a call is cut into thread blocks, and its launches.

Whole sequences where heads and sequences fill the GPU; else sequences are cut into segments that run side by side, by
three kernels. A schedule is made of what the host knows: how many tokens, sequences and heads, and how long the longest
sequence is, not each one's length.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch

from vllm_kda_plugin.kernels import loader

KERNEL = "kda_prefill_sm90"
HEAD_DIM = 128
CHUNK = 16
"""Tokens of a chunk: a checkpoint can be taken after each."""
# As csrc/kda_prefill_sm90.cu has them.
THREADS, COMBINE_THREADS, COMBINE_ROWS = 512, 256, 16
SHARED_BYTES = {True: 178_992, False: 231_152}
"""Of a block, for the bounded gate and for the other."""
COMBINE_SHARED_BYTES = 2 * 2 * COMBINE_ROWS * (2 * HEAD_DIM + 16)
_STATE = HEAD_DIM * HEAD_DIM
_SLOT_BYTES = 2 * _STATE * 4  # the end of a segment, and its M, of one head
_MOST_PLACES = 320  # slots times heads, more than any GPU has multiprocessors, twice
_POINTERS = 17


class _Times(NamedTuple):
    """Microseconds on one NVIDIA H200, solved from the times in ``tests/unit/test_kda_times.py``."""

    start: float
    """A block: states, and the first chunk."""
    step: float
    """A chunk of a block that has all values of its head."""
    half_step: float
    """Of one that has half of them."""
    silent_step: float
    """Of one that makes no output."""
    crowded: float
    """More, of a chunk of a block with all values, after its first 16, where blocks fill more than half of the GPU."""
    combine_step: float
    """A segment that is combined."""
    launch: float
    """A kernel more."""
    idle: float
    """A block that finds nothing to do."""


_BOUNDED = _Times(5.1, 1.18, 0.85, 0.8, 0.03, 2.6, 1.0, 1.42)
_SOFTPLUS = _Times(5.6, 1.25, 0.94, 0.87, 0.04, 2.9, 1.5, 1.11)
_NEVER_CROWDED = 16


class Schedule(NamedTuple):
    """How a call is cut."""

    splits: int = 1
    """Blocks that share the values of a head, 1 or 2."""
    segment_tokens: int = 0
    """A multiple of the chunk; 0: sequences are whole."""
    slots: int = 0
    """Places for what all segments but the last of each sequence leave, ``num_tokens // segment_tokens``; some stay
    empty."""
    most_segments: int = 0
    """Of a sequence; 0: any number."""

    def workspace_bytes(self, num_heads: int) -> int:
        """Bytes that the segments need."""
        return self.slots * num_heads * _SLOT_BYTES if self.segment_tokens else 0


class Step(NamedTuple):
    """One kernel of a call."""

    entry: str
    blocks: int
    threads: int
    shared_bytes: int


def load(device: torch.device) -> None:
    """Load the kernels on a GPU: during the capture of a CUDA graph it is too late.

    Raises:
        KernelUnavailable: they cannot be had there.
    """
    loader.load(KERNEL, torch.cuda.current_device() if device.index is None else device.index)


def workspace_bytes(num_tokens: int, num_heads: int) -> int:
    """Bytes of scratch that any schedule of such a call, or of one of fewer tokens, may need."""
    return min(num_tokens // CHUNK * num_heads, _MOST_PLACES) * _SLOT_BYTES


def schedule(
    num_tokens: int,
    num_sequences: int,
    num_heads: int,
    multiprocessors: int,
    *,
    max_seqlen: int | None = None,
    bounded: bool = True,
    batch_invariant: bool = False,
) -> Schedule:
    """The cut that should take the least time.

    Args:
        num_tokens: of all sequences.
        num_sequences: at least 1.
        num_heads: of this rank.
        multiprocessors: of the GPU; one block runs on each at a time.
        max_seqlen: no sequence has more tokens. As many as can are taken to have so many, the others to share what is
            left. None: all are taken to be equally long.
        bounded: the gate.
        batch_invariant: cut nothing, so that a sequence's result does not depend on the others.
    """
    if batch_invariant:
        return Schedule()
    longest = -(-num_tokens // num_sequences) if max_seqlen is None else min(max_seqlen, num_tokens)
    cut = _fastest_cut(_about(num_tokens), num_sequences, num_heads, multiprocessors, _about(longest), bounded)
    if not cut.segment_tokens:
        return cut
    most_segments = 0 if max_seqlen is None else -(-longest // cut.segment_tokens)
    return cut._replace(slots=num_tokens // cut.segment_tokens, most_segments=most_segments)


def _about(number: int) -> int:
    """Not less, by an eighth at most: steps of an engine that differ by little are cut alike."""
    grain = 1 << max(0, number.bit_length() - 4)
    return -(-number // grain) * grain


@functools.lru_cache(maxsize=4096)
def _fastest_cut(
    num_tokens: int, num_sequences: int, num_heads: int, multiprocessors: int, longest: int, bounded: bool
) -> Schedule:
    longest = max(1, longest)
    num_long = min(num_sequences, max(1, num_tokens // longest))
    num_short = num_sequences - num_long
    short = -(-max(0, num_tokens - num_long * longest) // num_short) if num_short else 0
    kinds = [(num_long * num_heads, -(-longest // CHUNK)), (num_short * num_heads, -(-short // CHUNK))]
    cuts = [Schedule(1), Schedule(2)]
    chunks = kinds[0][1]
    for segments in range(2, min(chunks, 64) + 1):
        length = -(-chunks // segments) * CHUNK
        slots = num_tokens // length
        if slots * num_heads > _MOST_PLACES:
            break
        cuts += [Schedule(1, length, slots), Schedule(2, length, slots)]
    num_states = num_sequences * num_heads
    return min(cuts, key=lambda cut: _us(cut, kinds, num_states, num_heads, multiprocessors, bounded))


def _us(
    cut: Schedule,
    kinds: Iterable[tuple[int, int]],
    num_states: int,
    num_heads: int,
    multiprocessors: int,
    bounded: bool,
) -> float:
    """Microseconds of a call cut so.

    Args:
        cut: of the call, with its slots.
        kinds: how many sequences' heads have how many chunks.
        num_states: sequences times heads.
        num_heads: of this rank.
        multiprocessors: of the GPU.
        bounded: the gate.
    """
    times = _BOUNDED if bounded else _SOFTPLUS
    length = cut.segment_tokens // CHUNK
    wholes = [(count, -(-chunks // length) if length else 1, chunks) for count, chunks in kinds if chunks]
    # Sequences' heads, segments of each, chunks of the last segment.
    parts = [(count, segments, chunks - (segments - 1) * length) for count, segments, chunks in wholes]
    inner = sum(count * (segments - 1) for count, segments, _ in parts)
    places = cut.slots * num_heads
    working = cut.splits * (inner + sum(count for count, *_ in parts))
    crowded = times.crowded if cut.splits == 1 and working > multiprocessors / 2 else 0.0

    def block(chunks: int) -> float:
        step = times.step if cut.splits == 1 else times.half_step
        return times.start + chunks * step + max(0, chunks - _NEVER_CROWDED) * crowded

    spare = places + num_states - inner - sum(count for count, *_ in parts)
    blocks = [(cut.splits * count, block(chunks)) for count, _, chunks in parts]
    blocks += [(cut.splits * inner, block(length)), (cut.splits * spare, times.idle)]
    last = _last_end(blocks, multiprocessors)
    if not length:
        return last
    firsts = sum(count for count, segments, _ in parts if segments > 1)
    silent = [
        (2 * inner - firsts, times.start + length * times.silent_step),
        (firsts, times.start),  # the state that a sequence begins with is put away
        (2 * (places - inner), times.idle),
    ]
    combined = max(segments for _, segments, _ in parts) - 2
    between = 2 * times.launch + combined * times.combine_step if combined > 0 else times.launch
    return _last_end(silent, multiprocessors) + between + last


def _last_end(blocks: Iterable[tuple[int, float]], multiprocessors: int) -> float:
    """When the last of so many blocks of these durations ends, if the longest begin first."""
    end, idle, gap = 0.0, 0, 0.0
    for count, duration in sorted(blocks, key=lambda kind: -kind[1]):
        rest = max(0, count - idle * int(gap / duration))
        if rest:
            rounds = -(-rest // multiprocessors)
            end, idle, gap = end + rounds * duration, rounds * multiprocessors - rest, duration
    return end


def steps(cut: Schedule, num_sequences: int, num_heads: int, bounded: bool) -> tuple[Step, ...]:
    """The kernels of a call, in order."""
    gate, shared = "bounded" if bounded else "softplus", SHARED_BYTES[bounded]
    blocks = (cut.slots + num_sequences) * num_heads * cut.splits
    last = Step(f"kda_prefill_{gate}_{HEAD_DIM // cut.splits}", blocks, THREADS, shared)
    if not cut.slots:  # no sequence has more than one segment
        return (last,)
    found = [Step(f"kda_segments_{gate}", cut.slots * num_heads * 2, THREADS, shared)]
    combined = min(num_sequences, cut.slots // 2) * num_heads * (HEAD_DIM // COMBINE_ROWS)
    if combined and cut.most_segments not in (1, 2):
        found.append(Step("kda_combine", combined, COMBINE_THREADS, COMBINE_SHARED_BYTES))
    return *found, last


class Tensors(NamedTuple):
    """The tensors of a call; see ``kda/prefill.py`` for each. Nothing is checked here.

    Heads and tokens of q, k, v, g and beta may lie apart, rows of the pool too; channels and states are dense. q, k, v,
    g and ``out`` start at 16 bytes and lie apart by multiples of 16, states at 8. ``initial_state`` is the pool where
    ``state_indices`` is given, and ``final_state`` may be None then: it is all that a sequence whose row is not in the
    pool leaves its state in, and that starts from zeros.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    cu_seqlens: torch.Tensor
    out: torch.Tensor
    final_state: torch.Tensor | None
    initial_state: torch.Tensor | None = None
    state_indices: torch.Tensor | None = None
    has_initial_state: torch.Tensor | None = None
    checkpoint_state: torch.Tensor | None = None
    checkpoint_offsets: torch.Tensor | None = None

    def constants(self, lower_bound: float | None, cut: Schedule) -> tuple[int, ...]:
        """The integers of the kernels' argument."""
        inputs, rows, pool = (self.q, self.k, self.v, self.g), self.state_indices, self.initial_state
        size, states = self.q.itemsize, pool if self.final_state is None else self.final_state
        return (
            self.q.shape[2],
            len(self.cu_seqlens) - 1,
            int(self.cu_seqlens.dtype == torch.int64),
            int(rows is not None and rows.dtype == torch.int64),
            len(pool) if rows is not None and pool is not None else 0,
            pool.stride(0) if rows is not None and pool is not None else 0,
            int(states is not None and states.dtype == torch.bfloat16),
            *(x.stride(1) * size for x in inputs),
            self.beta.stride(1),
            *(x.stride(2) * size for x in inputs),
            self.beta.stride(2),
            self.out.stride(1) * size,
            _float_bits(lower_bound or 0.0),
            cut.segment_tokens,
            cut.slots,
        )

    def pointers(self, workspace: int, maps: int) -> tuple[int, ...]:
        """The addresses that the kernels' argument begins with, those of the segments' ends and M last."""

        def address(tensor: torch.Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        return (
            self.q.data_ptr(),
            self.k.data_ptr(),
            self.v.data_ptr(),
            self.g.data_ptr(),
            self.beta.data_ptr(),
            self.A_log.data_ptr(),
            self.dt_bias.data_ptr(),
            self.cu_seqlens.data_ptr(),
            self.out.data_ptr(),
            address(self.initial_state),
            address(self.state_indices),
            address(self.has_initial_state),
            address(self.final_state),
            address(self.checkpoint_state),
            address(self.checkpoint_offsets),
            workspace,
            maps,
        )


def prefill(
    tensors: Tensors,
    lower_bound: float | None,
    workspace: torch.Tensor,
    *,
    cut: Schedule | None = None,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
) -> None:
    """Run KDA over all sequences on torch's current stream. Does not synchronise.

    Args:
        tensors: of the call.
        lower_bound: of the bounded gate, in [-5, 0); None for the softplus gate.
        workspace: at least :func:`workspace_bytes`, 16 bytes aligned.
        cut: in place of the one that :func:`schedule` chooses.
        max_seqlen: no sequence has more tokens; see :func:`schedule`.
        batch_invariant: see :func:`schedule`.

    Raises:
        KernelUnavailable: the kernels cannot be had on this GPU.
        ValueError: the workspace is too small.
    """
    device, num_heads = tensors.q.device.index, tensors.q.shape[2]
    num_sequences = len(tensors.cu_seqlens) - 1
    if cut is None:
        cut = schedule(
            tensors.q.shape[1],
            num_sequences,
            num_heads,
            _multiprocessors(device),
            max_seqlen=max_seqlen,
            bounded=lower_bound is not None,
            batch_invariant=batch_invariant,
        )
    need = cut.workspace_bytes(num_heads)
    if workspace.numel() < need:
        raise ValueError(f"workspace has {workspace.numel()} bytes, must be at least {need}")
    ends = workspace.data_ptr()
    pointers = tensors.pointers(ends, ends + need // 2)
    constants = tensors.constants(lower_bound, cut)
    for launch in _launches(device, steps(cut, num_sequences, num_heads, lower_bound is not None), constants):
        launch(*pointers)


@functools.lru_cache(maxsize=1024)
def _launches(device: int, kernels: tuple[Step, ...], constants: tuple[int, ...]) -> list[loader.Launch]:
    kernel = loader.load(KERNEL, device)
    return [
        kernel.prepare(
            step.entry,
            step.blocks,
            step.threads,
            _POINTERS,
            constants,
            comes_early=True,
            shared_bytes=step.shared_bytes,
        )
        for step in kernels
    ]


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _float_bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
