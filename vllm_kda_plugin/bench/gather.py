"""``vllm-kda bench gather``: how fast paged KV cache becomes contiguous K and V, beside other ways of doing it.

A way of doing it is timed only after all that it writes was found equal to what torch does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vllm_kda_plugin.bench import timing
from vllm_kda_plugin.bench.gather_cases import SMALL_SIZES, Case, cases, make_buffers
from vllm_kda_plugin.bench.timing import Call
from vllm_kda_plugin.kernels import loader
from vllm_kda_plugin.kernels.gather import gather_cached_kv, gather_paged_kv
from vllm_kda_plugin.kernels.gather_plan import KERNEL

PEERS = ("reference", "index_select", "cp_gather_cache")
_POISON = 0xA5
_PIPE_COLUMNS = 160


class WrongResult(RuntimeError):
    """A gather does not write what it must."""


def run(json_file: Path | None, plot_file: Path | None, num_tokens: Sequence[int] | None) -> int:
    """Measure, print and write; returns 1 if a result is wrong or nothing can be measured, else 0.

    Args:
        json_file: where all figures go, if anywhere.
        plot_file: where the plot goes, if anywhere; its format is that of its extension.
        num_tokens: sizes to measure in place of the usual ones.
    """
    device = timing.choose_device()
    try:
        if plot_file is not None:
            from vllm_kda_plugin.bench import plots
        if device.type == "cuda":
            loader.load(KERNEL, device.index)
    except (ImportError, loader.KernelUnavailable) as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("matplotlib")
        said = 'Plots need matplotlib; run: pip install "vllm-kda-plugin[bench]"' if missing else str(error)
        print(said, file=sys.stderr)
        return 1
    report = measure_all(device, num_tokens)
    show(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        plots.save_gather(report, plot_file)
    return int(any("wrong" in row for row in report["cases"]))


def measure_all(device: torch.device, num_tokens: Sequence[int] | None) -> dict[str, Any]:
    """Measure every case, telling of each as it is done; returns what --json writes."""
    report: dict[str, Any] = {**timing.describe(device), "copy_tb_per_s": timing.copy_tb_per_s(device)}
    timing.tell(report)
    if device.type == "cpu":
        print("No kernel runs on a CPU: what is timed here is torch.")
    report["host_us"] = _host_us(device) if device.type == "cuda" else None
    report["cases"] = [_measure_and_tell(case, device) for case in cases(device.type == "cpu", num_tokens)]
    return report


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """Check and time one case and its peers.

    Returns:
        Microseconds, terabytes a second and shares of the copy's speed, hot and, on a GPU, cold; under
        ``peers_without_time`` the peers whose result is wrong or who refuse.

    Raises:
        WrongResult: our own result is wrong.
    """
    ways, faults = prepare(case, timing.rotation_length(case.bytes_moved, device), device)
    if fault := faults.pop("ours", None):
        raise WrongResult(f"{case.entry} {fault}")
    ways |= timing.copies(case.bytes_moved, len(ways["ours"]), device)
    times = timing.measure(ways, case.bytes_moved, device)
    row: dict[str, Any] = {"calls_in_turn": len(ways["ours"]), "peers_without_time": faults}
    for state in ("hot", "cold"):
        us: dict[str, float | None] = {name: getattr(timed, f"{state}_us") for name, timed in times.items()}
        ours, copy, negate = us["ours"], us["copy"], us["negate"]
        if ours is None or copy is None or negate is None:
            continue
        row[f"{state}_us"] = ours
        row[f"{state}_tb_per_s"] = case.bytes_moved / ours / 1e6
        row[f"{state}_share_of_copy"] = min(copy, negate) / ours
        row[f"copy_{state}_us"] = min(copy, negate)
        row |= {f"{name}_{state}_us": us[name] for name in PEERS if name in us}
    return row


def prepare(case: Case, count: int, device: torch.device) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """``count`` calls of every way of doing a case, each made once and compared with torch.

    Returns:
        The calls by the way's name, "ours" first, and what is wrong with ways that are not among them.
    """
    num_caches = count
    if device.type == "cuda":
        # A cache for each call as far as they fit: what a call reads of the classic layout holds others' tokens too.
        num_caches = min(count, max(1, int(0.4 * torch.cuda.mem_get_info(device)[0]) // case.cache_bytes))
    ways: dict[str, list[Call]] = {"ours": []}
    faults: dict[str, str] = {}
    for buffers in make_buffers(case, count, num_caches, device):
        outs = buffers.outs
        expected, apart = ([torch.empty_like(out).contiguous() for out in outs] for _ in range(2))
        buffers.gather("torch", expected)()
        calls: dict[str, tuple[Call, Sequence[torch.Tensor]]] = {"ours": (buffers.gather("auto", outs), outs)}
        if device.type == "cuda" and case.order != "table":
            calls["reference"] = buffers.gather("reference", outs), outs
        if case.layout != "classic" and case.dtype == case.cache_dtype:
            calls["index_select"] = buffers.index_select(apart), apart
        if device.type == "cuda" and case.layout == "packed" and (vllm_gather := _vllm_gather()):
            table, bounds, starts = buffers.tables
            source, out = buffers.caches[0].flatten(2), apart[0].flatten(1)
            peer = functools.partial(vllm_gather, source, out, table, bounds, case.requests, starts)
            calls["cp_gather_cache"] = peer, apart
        for name, (call, written) in calls.items():
            ways.setdefault(name, []).append(call)
            if fault := _fault(call, written, expected):
                faults[name] = fault
    return {name: calls for name, calls in ways.items() if name not in faults}, faults


def show(report: dict[str, Any]) -> None:
    """Print the table of all cases, and what a call costs the host."""
    table = Table(title="Gather of paged KV cache")
    rows = [_cells(row) for row in report["cases"]]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    console.print(table)
    print("GB/s above: GiB/s of K and V one way, as in 2023. TB/s: read and written, in powers of 1,000.")
    print("Of copy: speed beside the faster of Tensor.copy_ and torch.neg on as many bytes.")
    print("Peers: us, and in brackets how many times ours that is.")
    if report["host_us"]:
        print("cold: nothing in the L2 cache. All else: the same buffers every time, in the cache as far as they fit.")
    for entry, us in (report["host_us"] or {}).items():
        print(f"{entry}: {us:.1f} us of the host's time a call")
    for row in report["cases"]:
        for peer, fault in row.get("peers_without_time", {}).items():
            print(f"{row['case']}, {row['tokens']:,} tokens: {peer} is not timed, it {fault}")


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table, by column."""
    cells = {"case": row["case"], "tokens": f"{row['tokens']:,}"}
    if "hot_us" not in row:
        return cells | {"us": "skipped" if "skipped" in row else "[bold red]WRONG[/]"}
    cells["us"] = f"{row['hot_us']:,.2f}"
    if "cold_us" in row:
        cells["cold us"] = f"{row['cold_us']:,.2f}"
    cells["TB/s"] = f"{row['hot_tb_per_s']:.3g}"
    cells["of copy"] = f"{row['hot_share_of_copy']:.0%}"
    if "cold_us" in row:
        cells["cold of copy"] = f"{row['cold_share_of_copy']:.0%}"
    for peer in PEERS:
        if us := row.get(f"{peer}_hot_us"):
            cells[peer] = f"{us:,.2f} ({us / row['hot_us']:.2f}x)"
    return cells


def _measure_and_tell(case: Case, device: torch.device) -> dict[str, Any]:
    """A row of the report, and the lines of vLLM's benchmark of 2023: GB/s is GiB/s there, of K and V once."""
    row: dict[str, Any] = {"case": f"{case.kind}, page {case.block_size}", **vars(case)}
    row |= {"dtype": str(case.dtype), "cache_dtype": str(case.cache_dtype)}
    for name in ("entry", "tokens", "num_blocks", "bytes_moved", "bytes_written"):
        row[name] = getattr(case, name)
    print(f"\n{row['case']}")
    print(
        f"num_tokens: {case.tokens}, num_heads: {case.num_heads}, head_size: {case.head_size}, "
        f"block_size: {case.block_size}, num_blocks: {case.num_blocks}, dtype: {case.dtype}"
    )
    try:
        row |= measure(case, device)
        print(f"[Latency] {case.entry}: {row['hot_us'] / 1e3:.5f} ms")
        print(f"[Throughput] {case.entry}: {case.bytes_written / row['hot_us'] * 1e6 / (1 << 30):.3f} GB/s", flush=True)
    except torch.OutOfMemoryError:
        row["skipped"] = f"does not fit into the {torch.cuda.mem_get_info(device)[0] / 1e9:.1f} GB free on this GPU"
        print(f"Skipped: {row['skipped']}", flush=True)
    except WrongResult as error:
        row["wrong"] = str(error)
        print(f"WRONG, so not timed: {error}", flush=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _host_us(device: torch.device) -> dict[str, float]:
    """Microseconds of the host's time that a call takes as an engine makes it, by entry point."""
    slots_case = Case("", "NHD", "slots", SMALL_SIZES[0], 16)
    [by_slots], [by_table] = (
        list(make_buffers(case, 1, 1, device)) for case in (slots_case, dataclasses.replace(slots_case, order="table"))
    )
    key, value, key_cache, value_cache, slots = *by_slots.outs, *by_slots.caches, by_slots.slots
    table_args = *by_table.outs, *by_table.caches, *by_table.tables
    return {
        "gather_cached_kv": timing.host_us(lambda: gather_cached_kv(key, value, key_cache, value_cache, slots)),
        "gather_paged_kv": timing.host_us(lambda: gather_paged_kv(*table_args)),
    }


def _fault(call: Call, outs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """Call once; "" if it writes what is expected, else what is wrong."""
    for out in outs:
        out.view(torch.uint8).fill_(_POISON)
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        return f"fails: {error}"
    pairs = zip(outs, expected, strict=True)
    same = all(torch.equal(out.view(torch.uint8), wanted.view(torch.uint8)) for out, wanted in pairs)
    return "" if same else "does not write what torch does"


@functools.cache
def _vllm_gather() -> Callable[..., object] | None:
    """vLLM's gather of packed pages, None if this vLLM is not built for CUDA."""
    try:
        from vllm import _custom_ops

        return _custom_ops.cp_gather_cache if hasattr(torch.ops._C_cache_ops, "cp_gather_cache") else None
    except (ImportError, OSError, RuntimeError):
        return None
