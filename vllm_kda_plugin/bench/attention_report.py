"""What ``vllm-kda bench attention`` says of its measurements."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_kda_plugin.bench.attention_cases import LAYERS, LONG_LAYERS, LONG_US, SHORT_LAYERS, SHORT_US

Row = dict[str, Any]
LOWEST_RATIO = 0.98
_PIPE_COLUMNS = 190


def _long(row: Row) -> bool:
    return row["query"] is not None and row["query"] >= 2048 and row["context"] >= 30_000


def _grouped(row: Row) -> bool:
    return bool(row["head_size"] == 128 and row["num_heads"] > row["num_kv_heads"])


def _first(row: Row) -> bool:
    return row["query"] is not None and row["query"] >= 2048 and row["context"] == 0


MEANS: dict[str, tuple[Callable[[Row], bool], float]] = {
    "context 30k or more, query 2048 or more, grouped-query heads of 128": (
        lambda row: _long(row) and _grouped(row),
        1.10,
    ),
    "context 30k or more, query 2048 or more, all heads": (_long, 1.07),
    "first prefills of 2048 or more": (_first, 1.12),
}
"""Geometric means over batches of one, pages other than 128, and what they should be at least."""


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that matter most.

    Returns:
        ``means``: name to ``mean`` (geometric, None without cells), ``cells``, ``at_least``; ``lowest``: the cell of
        the lowest ratio; ``below``: how many cells are below 0.98; ``cells``; ``wrong``: how many are.
    """
    means: dict[str, Any] = {}
    for name, (belongs, at_least) in MEANS.items():
        ratios = [row["ratio"] for row in rows if row["page_size"] != 128 and belongs(row)]
        mean = statistics.geometric_mean(ratios) if ratios else None
        means[name] = {"mean": mean, "cells": len(ratios), "at_least": at_least}
    return {
        "means": means,
        "lowest": min(rows, key=lambda row: row["ratio"], default=None),
        "below": sum(row["ratio"] < LOWEST_RATIO for row in rows),
        "cells": len(rows),
        "wrong": sum("wrong" in row for row in rows),
    }


def show(report: dict[str, Any]) -> None:
    """Print the tables and the summary."""
    print(", ".join(f"{name.replace('_', ' ')} {found}" for name, found in report["machine"].items()))
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    console.print(_grid(report["cases"]))
    print(
        f"us: a layer's part of a step of {SHORT_LAYERS} layers, {LAYERS} where one takes {SHORT_US:,.0f} us or more, "
        f"{LONG_LAYERS} from {LONG_US:,.0f}, with its one build; short steps three in a row, "
        "from idle GPU to idle GPU; decodes only are full CUDA graphs."
    )
    print("ratio: stock / ours, median of the rounds, in brackets quartiles. GPU us: of one layer, no host time.")
    print("differs: ours from stock, beside two stock runs of 1 and 4 splits; of the row's largest value.")
    if report["peers"]:
        console.print(_peers(report["peers"]))
        for row in report["peers"]:
            if "query" not in row:
                print(f"{row['name']}: {row['error']}")
    for line in summary_lines(report["summary"]):
        print(line)


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary in words."""
    lines = []
    for name, found in summary["means"].items():
        if found["mean"] is not None:
            lines.append(
                f"{name}: {found['mean']:.3f} times as fast as stock, geometric mean of {found['cells']} cells "
                f"(at least {found['at_least']:.2f} is wanted)"
            )
    if summary["lowest"] is not None:
        row = summary["lowest"]
        lines.append(f"lowest: {row['ratio']:.3f}, {place(row)}, {row['path']}")
    lines.append(f"below {LOWEST_RATIO}: {summary['below']} of {summary['cells']} cells")
    if summary["wrong"]:
        lines.append(f"WRONG: {summary['wrong']} cells")
    return lines


def place(row: Row) -> str:
    """Which cell a row is of."""
    return f"{heads(row)}, page {row['page_size']}, {row['size']}"


def heads(row: Row) -> str:
    """The shape of a row's layer."""
    return f"{row['num_heads']}/{row['num_kv_heads']} D{row['head_size']}"


def _grid(rows: Sequence[Row]) -> Table:
    table = Table(title="Attention, ours beside FLASH_ATTN")
    for column in ("heads", "page", "query after context", "path"):
        table.add_column(column)
    for column in ("stock us", "ours us", "ratio", "GPU us: stock", "ours", "gather", "attention", "differs"):
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row["ratio_quartiles"]
        ratio = f"{row['ratio']:.3f} ({low:.2f}-{high:.2f})"
        gpu = row.get("gpu_us", {})
        agreed = row["agreement"]
        differs = f"{agreed['ours']['row']:.1e} / {agreed['splits']['row']:.1e}"
        table.add_row(
            heads(row),
            str(row["page_size"]),
            row["size"],
            row["path"],
            f"{row['stock_us']:,.1f}",
            f"{row['ours_us']:,.1f}",
            f"[red]{ratio}[/]" if row["ratio"] < LOWEST_RATIO else ratio,
            *(f"{gpu[name]:,.1f}" if name in gpu else "" for name in ("stock", "ours", "gather", "attention")),
            f"[bold red]WRONG {differs}[/]" if "wrong" in row else differs,
        )
    return table


def _peers(rows: Sequence[Row]) -> Table:
    table = Table(title="vLLM's other backends beside FLASH_ATTN")
    for column in ("backend", "heads", "page", "query after context"):
        table.add_column(column)
    for column in ("us", "stock us", "stock / it", "differs"):
        table.add_column(column, justify="right")
    for row in rows:
        if "query" not in row:
            continue
        where = row["name"], heads(row), str(row["page_size"]), row["size"]
        if "error" in row:
            table.add_row(*where, row["error"])
            continue
        figures = f"{row['us']:,.1f}", f"{row['stock_us']:,.1f}", f"{row['ratio']:.3f}"
        table.add_row(*where, *figures, f"{row['difference']['row']:.1e}")
    return table
