"""The kernels of csrc/gather_cached_kv.cu in Python, on plain memory of the CPU.

They take the same arguments, out of the same structs, and fault where a GPU would: on an address that is not a multiple
of what is moved, and on memory that is not the call's.
"""

from __future__ import annotations

import bisect
import ctypes
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tests.support.exact import product_table
from tests.support.paged import Call
from vllm_kda_plugin.kernels import gather_plan, loader

SOURCE = (Path(loader.__file__).parents[2] / "csrc" / "gather_cached_kv.cu").read_text(encoding="utf-8")
_ENTRY = re.compile(
    r"gather_(?:(?P<source>slots|table)_(?P<kind>dense|wide|narrow)|(?P<form>classic|elements))_"
    r"(?:(?P<fp8>e4m3|e5m2)_(?P<wide>float16|bfloat16))?_?(?P<vector>\d*)(?:_(?P<loads>\d+))?"
)
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_WIDE = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def members(name: str) -> dict[str, bool]:
    """Members of a struct of the source in order, and whether each is a pointer."""
    found = re.search(rf"struct {name} \{{(.*?)\n\}};", SOURCE, re.DOTALL)
    assert found is not None
    declarations = re.findall(r"^ +([\w ]+)(\*?) (\w+);", found[1], re.MULTILINE)
    assert len(declarations) == found[1].count(";")
    return {member: bool(star) for _, star, member in declarations}


def constant(name: str) -> int:
    """An integer constant of the source."""
    found = re.search(rf"\b{name} = ([^,;]+)[,;]|#define {name} (\d+)", SOURCE)
    assert found is not None, name
    digits = re.sub(r"[A-Za-z_]\w*", lambda word: str(constant(word[0])), found[1] or found[2])
    return int(eval(digits))


class Memory:
    """What a kernel may read and write: the storages of a call's tensors."""

    def __init__(self, call: Call) -> None:
        self._readable: list[tuple[int, int]] = []
        self._writable: list[tuple[int, int]] = []
        for name, tensor in call.items():
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ends = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
                (self._writable if name in ("key", "value") else self._readable).append(ends)

    def read(self, address: int, size: int) -> bytes:
        assert address % size == 0, "misaligned load"
        assert any(start <= address and address + size <= end for start, end in self._readable), "load out of bounds"
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        assert address % min(len(data), 16) == 0, "misaligned store"
        inside = any(start <= address and address + len(data) <= end for start, end in self._writable)
        assert inside, "store out of bounds"
        ctypes.memmove(address, data, len(data))

    def number(self, code: str, address: int) -> int:
        """An integer, "i" of 32 bits or "q" of 64."""
        number: int = struct.unpack(code, self.read(address, struct.calcsize(code)))[0]
        return number

    def scale(self, address: int, entry: int) -> float:
        scale: float = struct.unpack("f", self.read(address + 4 * entry, 4))[0] if address else 1.0
        return scale


class Prepared:
    """A launch of which all but the pointers is known, as loader.Launch."""

    def __init__(
        self,
        gpu: Gpu,
        entry: str,
        blocks: int,
        threads: int,
        num_pointers: int,
        constants: Sequence[int],
        comes_early: bool,
    ) -> None:
        assert comes_early != entry.startswith("gather_elements")  # the others wait before they touch memory
        assert entry in loader.KERNELS[gather_plan.KERNEL]
        assert 0 < blocks < 2**31
        assert 0 < threads <= 1024
        form = _ENTRY.fullmatch(entry)
        assert form is not None
        names = members("ScatteredArgs" if form["form"] else "PagedArgs")
        self.entry, self.blocks, self.threads = entry, blocks, threads
        self.constants = dict(zip(list(names)[num_pointers:], constants, strict=True))
        self._gpu, self._form, self._pointers = gpu, form, list(names)[:num_pointers]
        for name, is_pointer in names.items():
            assert name in self._pointers or not is_pointer or self.constants[name] == 0
            assert name in self.constants or is_pointer
        for name, value in self.constants.items():
            assert -(2**63) <= value < 2**63, name

    def __call__(self, *pointers: int) -> None:
        """Run, on the memory of the call."""
        self._gpu.launched.append(self.entry)
        given = dict(zip(self._pointers, pointers, strict=True))
        run = _run_scattered if self._form["form"] else _run_paged
        run(self._form, self, SimpleNamespace(**given, **self.constants), Memory(self._gpu.call))

    def of_this_thread(self) -> Callable[..., None]:
        """Itself."""
        return self


class Gpu:
    """Stands in for the loaded kernels: what is launched runs at once, on the memory of ``call``."""

    def __init__(self) -> None:
        self.prepared: list[Prepared] = []
        self.launched: list[str] = []
        self.call: Call = {}

    @property
    def entries(self) -> list[str]:
        return [prepared.entry for prepared in self.prepared]

    def prepare(
        self,
        entry: str,
        blocks: int,
        threads: int,
        num_pointers: int,
        constants: Sequence[int],
        *,
        comes_early: bool = False,
    ) -> Prepared:
        """As loader.Kernel."""
        prepared = Prepared(self, entry, blocks, threads, num_pointers, constants, comes_early)
        self.prepared.append(prepared)
        return prepared


def _divide(number: int, divisor: int, packed: int) -> int:
    """As the kernels do it below 2^31."""
    multiplier, shift = packed & 0xFFFFFFFF, packed >> 32
    assert (number * multiplier >> shift) == number // divisor
    return number // divisor


def _convert(form: re.Match[str], data: bytes, scale: float) -> bytes:
    if form["fp8"] is None:
        return data
    table = product_table(_FP8[form["fp8"]], scale, _WIDE[form["wide"]])
    return b"".join(struct.pack("h", int(table[code])) for code in data)


# ---- gather_slots_*, gather_table_* ---------------------------------------------------------------------------------


def _run_paged(form: re.Match[str], prepared: Prepared, a: SimpleNamespace, memory: Memory) -> None:
    vector = int(form["vector"])
    out_vector = vector * (2 if form["fp8"] else 1)
    sources: dict[int, int | None] = {}
    for row, index in _deal_vectors(form, prepared, a, memory):
        if row not in sources:
            sources[row] = _find_token(a, memory, row) if form["source"] == "table" else _find_slot(a, memory, row)
        source = sources[row]
        if source is None:
            continue
        run = _divide(index, a.run_vecs, a.by_run_vecs)
        vec = index - run * a.run_vecs
        of_value = run >= a.runs
        run -= a.runs if of_value else 0
        cache, out, scale = (a.value_cache, a.value, a.value_scale) if of_value else (a.key_cache, a.key, a.key_scale)
        data = memory.read(cache + source + run * a.run_stride + vec * vector, vector)
        number = memory.scale(scale, run * a.scale_stride) if form["fp8"] else 1.0
        to = out + row * a.out_token_stride + run * a.out_run_stride + vec * out_vector
        memory.write(to, _convert(form, data, number))


def _deal_vectors(
    form: re.Match[str], prepared: Prepared, a: SimpleNamespace, memory: Memory
) -> Iterator[tuple[int, int]]:
    """Row and index in the row of every vector that a thread moves."""
    rows = a.num_rows
    if form["source"] == "table":
        rows = min(rows, memory.number("i", a.cu_seqlens_k + 4 * a.num_reqs))
    a_block = prepared.threads * int(form["loads"])
    if form["kind"] == "wide":
        assert a_block >= a.piece_vecs
        assert prepared.blocks == a.num_rows * a.row_blocks
        assert (a.step_runs, a.step_vecs) == divmod(prepared.threads, a.run_vecs)
        for block in range(prepared.blocks):
            row = _divide(block, a.row_blocks, a.by_row_blocks)
            first = (block - row * a.row_blocks) * a.piece_vecs
            if row < rows:
                yield from ((row, index) for index in range(first, min(first + a.piece_vecs, a.token_vecs)))
        return
    if form["kind"] == "dense":
        assert a_block >= a.piece_vecs
        assert a.runs == 1
        assert prepared.blocks == a.num_rows * a.row_blocks
        for block in range(prepared.blocks):
            row = _divide(block, a.row_blocks, a.by_row_blocks)
            plane, piece = divmod(block - row * a.row_blocks, a.pieces)
            first, end = piece * a.piece_vecs, min((piece + 1) * a.piece_vecs, a.run_vecs)
            if row < rows:
                yield from ((row, plane * a.run_vecs + index) for index in range(first, end))
        return
    assert prepared.threads == constant("kNarrowThreads")
    assert (prepared.blocks - 1) * a_block < a.num_rows * a.token_vecs <= prepared.blocks * a_block
    for index in range(rows * a.token_vecs):
        row = _divide(index, a.token_vecs, a.by_token_vecs)
        yield row, index - row * a.token_vecs


def _find_slot(a: SimpleNamespace, memory: Memory, row: int) -> int | None:
    slot = memory.number("q", a.rows + 8 * row) if a.slots_are_64_bit else memory.number("i", a.rows + 4 * row)
    if not 0 <= slot < a.num_blocks * a.block_size:
        return None
    block = _divide(slot, a.block_size, a.by_block_size)
    place: int = block * a.block_stride + (slot - block * a.block_size) * a.token_stride
    return place


def _find_token(a: SimpleNamespace, memory: Memory, row: int) -> int | None:
    bounds = [memory.number("i", a.cu_seqlens_k + 4 * request) for request in range(a.num_reqs)]
    request = max(bisect.bisect_right(bounds, row) - 1, 0)
    position = row - bounds[request] + memory.number("i", a.seq_starts + 4 * request)
    assert a.max_positions == min(a.max_blocks * a.block_size, 2**32)
    if not 0 <= position < a.max_positions:
        return None
    logical_block = _divide(position, a.block_size, a.by_block_size)
    block = memory.number("i", a.rows + 4 * (request * a.table_stride + logical_block))
    if not 0 <= block < a.num_blocks:
        return None
    place: int = block * a.block_stride + (position - logical_block * a.block_size) * a.token_stride
    return place


# ---- gather_classic_*, gather_elements_* ----------------------------------------------------------------------------


class Piece(NamedTuple):
    """A load, the part of it that is kept, and where in the row of the output that goes, in elements."""

    address: int
    size: int
    skip: int
    keep: int
    element: int


def _run_scattered(form: re.Match[str], prepared: Prepared, a: SimpleNamespace, memory: Memory) -> None:
    size = 1 if form["fp8"] else int(form["vector"])
    out_size = 2 * size if form["fp8"] else size
    pieces = _elements
    if form["form"] == "classic":
        pieces = _chunks
        assert prepared.threads == (constant("kKeyWarps") + constant("kValueWarps")) * constant("kWarp")
        tiles = -(-a.num_rows // constant("kClassicTokens"))
        head_groups = -(-a.num_heads // a.head_group)
        assert prepared.blocks == tiles * head_groups
        assert (a.x * size, a.block_size * size % 16, a.value_token_stride) == (16, 0, size)
    else:
        assert prepared.blocks == a.num_rows
    for row in range(a.num_rows):
        slot = memory.number("q", a.slots + 8 * row) if a.slots_are_64_bit else memory.number("i", a.slots + 4 * row)
        if not 0 <= slot < a.num_slots:
            continue
        block = _divide(slot, a.block_size, a.by_block_size)
        offset = slot - block * a.block_size
        for head in range(a.num_heads):
            key = a.key_cache + block * a.key_block_stride + head * a.key_head_stride
            value = a.value_cache + block * a.value_block_stride + head * a.value_head_stride
            of_key, of_value = pieces(a, size, key, value, offset)
            key_out = a.key + row * a.key_out_token_stride + head * a.key_out_head_stride
            value_out = a.value + row * a.value_out_token_stride + head * a.value_out_head_stride
            for plane, out, scale in ((of_key, key_out, a.key_scale), (of_value, value_out, a.value_scale)):
                number = memory.scale(scale, head * a.scale_stride) if form["fp8"] else 1.0
                for piece in plane:
                    data = memory.read(piece.address, piece.size)[piece.skip :][: piece.keep]
                    memory.write(out + piece.element * out_size, _convert(form, data, number))


def _chunks(a: SimpleNamespace, size: int, key: int, value: int, offset: int) -> tuple[list[Piece], list[Piece]]:
    """One token of one head by 16 bytes, which hold x elements of it in K and one element of x tokens in V."""
    key += offset * a.key_token_stride
    value += offset // a.x * 16
    return (
        [Piece(key + i * a.key_chunk_stride, 16, 0, 16, i * a.x) for i in range(a.head_size // a.x)],
        [Piece(value + i * a.value_dim_stride, 16, offset % a.x * size, size, i) for i in range(a.head_size)],
    )


def _elements(a: SimpleNamespace, size: int, key: int, value: int, offset: int) -> tuple[list[Piece], list[Piece]]:
    """One token of one head by elements."""
    key += offset * a.key_token_stride
    value += offset * a.value_token_stride
    dims = range(a.head_size)
    return (
        [Piece(key + i // a.x * a.key_chunk_stride + i % a.x * size, size, 0, size, i) for i in dims],
        [Piece(value + i * a.value_dim_stride, size, 0, size, i) for i in dims],
    )
