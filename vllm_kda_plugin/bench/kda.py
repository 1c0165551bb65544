"""``vllm-kda bench kda``: the kernels of a KDA prefill beside one another, and how far each is from float64."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vllm_kda_plugin.bench import kda_overhead, timing
from vllm_kda_plugin.bench.kda_cases import Call, Case, Reference, cases, draw
from vllm_kda_plugin.bench.progress import progress
from vllm_kda_plugin.kda.providers import PROVIDERS

_MOST_ERROR = 0.05  # What a kernel that is right does not come near: bfloat16 rounds by 0.002.
_PIPE_COLUMNS = 160


def run(json_file: Path | None, plot_file: Path | None, overhead: bool) -> int:
    """Measure, print and write; returns 1 if a result is wrong or nothing can be measured, 130 after ctrl-c, else 0.

    Args:
        json_file: where all figures go, if anywhere.
        plot_file: where the plot goes, if anywhere; its format is that of its extension.
        overhead: measure what allocating costs in place of the kernels.
    """

    def keep(report: dict[str, Any]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    device = timing.choose_device()
    try:
        if plot_file is not None:
            from vllm_kda_plugin.bench import plots
        report = kda_overhead.measure_all(device) if overhead else measure_all(device, keep)
    except ImportError as error:
        missing = (error.name or "").startswith("matplotlib")
        said = 'Plots need matplotlib; run: pip install "vllm-kda-plugin[bench]"' if missing else str(error)
        print(said, file=sys.stderr)
        return 1
    if not overhead:
        show(report)
    keep(report)
    if plot_file is not None and report["cases"]:
        (plots.save_kda_overhead if overhead else plots.save_kda)(report, plot_file)
    return 130 if report.get("interrupted") else int(any("wrong" in row for row in report["cases"]))


def measure_all(device: torch.device, keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Measure every case, or as many as come before ctrl-c; returns what --json writes.

    Args:
        device: a GPU or the CPU.
        keep: is given the report after every case, for a kernel that tunes itself may take minutes, or not end.
    """
    report: dict[str, Any] = {**timing.describe(device), "copy_tb_per_s": timing.copy_tb_per_s(device)}
    timing.tell(report)
    if device.type == "cpu":
        print("No kernel runs on a CPU: what is timed here is torch, at small sizes.")
    report["left_out"] = {}
    rows: list[dict[str, Any]] = []
    report["cases"] = rows
    grid = list(cases(device.type == "cpu"))
    try:
        with progress(len(grid)) as tell:
            for case in grid:
                tell(f"{case.gate}, {case.decay} decay, {case.heads} heads, {case.sequences}")
                rows.append(measure(case, device, report))
                keep(report)
    except KeyboardInterrupt:
        report["interrupted"] = True  # what has been measured is shown all the same
    return report


def measure(case: Case, device: torch.device, report: dict[str, Any]) -> dict[str, Any]:
    """Check and time one case on every kernel that can do it; notes in ``report["left_out"]`` which cannot, and why.

    Returns:
        Microseconds and errors by provider, ``floor_us`` that moving the bytes once takes; under ``wrong`` the
        providers whose result is.
    """
    row: dict[str, Any] = {**vars(case), "tokens": case.tokens, "bytes_moved": case.bytes_moved}
    row["floor_us"] = case.bytes_moved / report["copy_tb_per_s"] / 1e6
    able = {}
    for name, provider in PROVIDERS.items():
        reason = provider.why_not(case.layer(device))
        if reason is None and name == "torch" and device.type == "cuda":
            reason = "it is the path of the CPU"
        if reason is None:
            able[name] = provider
        else:
            report["left_out"].setdefault(f"{name}, {case.gate} gate", reason)
    try:
        inputs = draw(case, device)
        calls = {name: Call.make(inputs, provider) for name, provider in able.items()}
        reference = Reference(inputs)
        row["providers"] = {}
        for name, call in calls.items():
            call()
            out, state = reference.errors(call)
            row["providers"][name] = {"error_out": out, "error_state": state}
            if not max(out, state) < _MOST_ERROR or math.isnan(out + state):
                row.setdefault("wrong", []).append(name)
        for name, us in timing.busy_us(calls, device).items():
            row["providers"][name]["us"] = us
    except torch.OutOfMemoryError:
        row["skipped"] = "does not fit into the memory of this GPU"
    return row


def show(report: dict[str, Any]) -> None:
    """Print the table of all cases."""
    names = [name for name in PROVIDERS if any(name in row.get("providers", {}) for row in report["cases"])]
    table = Table(title="KDA prefill: us (relative error of the output, of the final states)")
    for column in ("gate", "decay", "heads", "sequences", "floor", *names):
        table.add_column(column, justify="left" if column in ("gate", "decay", "sequences") else "right")
    for row in report["cases"]:
        found = [_cell(row, name) for name in names]
        table.add_row(row["gate"], row["decay"], str(row["heads"]), row["sequences"], f"{row['floor_us']:,.1f}", *found)
    Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False).print(table)
    if report.get("interrupted"):
        print("Interrupted: the cases that were to come are missing.")
    print("floor: every byte read or written once, at the speed of a large copy.")
    print("us: of one call that follows another. States are in float32, all else in bfloat16. Errors: against float64.")
    for name, reason in report["left_out"].items():
        print(f"Left out: {name}: {reason}")


def _cell(row: dict[str, Any], name: str) -> str:
    if "skipped" in row:
        return "skipped"
    found = row["providers"].get(name)
    if found is None:
        return ""
    wrong = " [bold red]WRONG[/]" if name in row.get("wrong", []) else ""
    return f"{found['us']:,.1f} ({found['error_out']:.1e}, {found['error_state']:.1e}){wrong}"
