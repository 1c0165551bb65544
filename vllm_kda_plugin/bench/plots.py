"""The plots of the benchmarks, from what their --json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

_PEER_MARKERS = {"reference": "v", "index_select": "x", "cp_gather_cache": "+"}
_DECAY_STYLES = {"fast": "-", "slow": "--"}
_TITLES = {"hot": "the same buffers every time", "cold": "nothing in the L2 cache"}


def save_gather(report: dict[str, Any], file: Path) -> None:
    """Plot read and written TB/s over MB moved, hot and cold, with the peers and the copy's ceiling.

    Args:
        report: what ``vllm-kda bench gather --json`` writes.
        file: where to; the format is that of its extension.
    """
    rows = [row for row in report["cases"] if "hot_us" in row]
    states = ["hot", "cold"] if any("cold_us" in row for row in rows) else ["hot"]
    figure = Figure(figsize=(8 * len(states), 8), layout="constrained")
    figure.suptitle(f"Gather of paged KV, {report['machine']['device']}")
    axes = list(figure.subplots(1, len(states), sharey=True, squeeze=False)[0])
    for panel, state in zip(axes, states, strict=True):
        _draw(panel, rows, state)
        panel.set_title(_TITLES[state] if len(states) > 1 else "")
        panel.axhline(report["copy_tb_per_s"], color="black", linewidth=1, label="large copy")
        panel.set(xscale="log", yscale="log", xlabel="MB read and written", ylabel="TB/s read and written")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        panel.grid(which="both", alpha=0.2)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(file, dpi=150)


def save_kda(report: dict[str, Any], file: Path) -> None:
    """Plot microseconds over heads, a panel for each gate and kind of sequences, with the floor by bytes.

    Args:
        report: what ``vllm-kda bench kda --json`` writes.
        file: where to; the format is that of its extension.
    """
    rows = [row for row in report["cases"] if "providers" in row and "skipped" not in row]
    gates, kinds = (list(dict.fromkeys(row[name] for row in rows)) for name in ("gate", "sequences"))
    figure = Figure(figsize=(4 * len(kinds), 4 * len(gates)), layout="constrained")
    figure.suptitle(f"KDA prefill, {report['machine']['device']}")
    axes = figure.subplots(len(gates), len(kinds), sharex=True, squeeze=False)
    for gate, line in zip(gates, axes, strict=True):
        for kind, panel in zip(kinds, line, strict=True):
            here = [row for row in rows if (row["gate"], row["sequences"]) == (gate, kind)]
            floor = sorted({(row["heads"], row["floor_us"]) for row in here})
            panel.plot(*zip(*floor, strict=True), color="black", linewidth=1, label="every byte once")
            for index, name in enumerate(dict.fromkeys(name for row in here for name in row["providers"])):
                for decay, style in _DECAY_STYLES.items():
                    points = sorted(
                        (row["heads"], row["providers"][name]["us"])
                        for row in here
                        if row["decay"] == decay and name in row["providers"]
                    )
                    if points:
                        label = f"{name}, {decay} decay"
                        panel.plot(*zip(*points, strict=True), f"o{style}", color=f"C{index}", label=label)
            panel.set(title=f"{gate}, {kind}", xlabel="heads", ylabel="us", yscale="log")
            panel.grid(which="both", alpha=0.2)
            panel.legend(fontsize="x-small")
    figure.savefig(file, dpi=150)


def save_kda_overhead(report: dict[str, Any], file: Path) -> None:
    """Plot milliseconds of a layer's prefill over tokens, before and after, a panel for each provider.

    Args:
        report: what ``vllm-kda bench kda --overhead --json`` writes.
        file: where to; the format is that of its extension.
    """
    names = list(dict.fromkeys(row["provider"] for row in report["cases"]))
    figure = Figure(figsize=(6 * len(names), 5), layout="constrained")
    figure.suptitle(f"KDA prefill with and without a workspace, {report['machine']['device']}")
    for name, panel in zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True):
        rows = [row for row in report["cases"] if row["provider"] == name]
        tokens = [row["tokens"] for row in rows]
        panel.plot(tokens, [row["before_ms"] for row in rows], "o--", label="before: allocating")
        panel.plot(tokens, [row["after_ms"] for row in rows], "o-", label="after: workspace")
        panel.set(title=name, xlabel="tokens", ylabel="ms", xscale="log")
        panel.grid(which="both", alpha=0.2)
        panel.legend()
    figure.savefig(file, dpi=150)


def save_attention(report: dict[str, Any], file: Path) -> None:
    """Plot stock time / our time of batches of one: a heat map, query by context, of each head shape and page.

    Args:
        report: what ``vllm-kda bench attention --json`` writes.
        file: where to; the format is that of its extension.
    """
    rows = [row for row in report["cases"] if row["query"] is not None]
    shapes = list(dict.fromkeys((row["num_heads"], row["num_kv_heads"], row["head_size"]) for row in rows))
    pages, queries, contexts = (sorted({row[name] for row in rows}) for name in ("page_size", "query", "context"))
    figure = Figure(figsize=(1.5 + 3.6 * len(pages), 1 + 2.1 * len(shapes)), layout="constrained")
    figure.suptitle(f"FLASH_ATTN time / our time, a layer's part of a step, {report['machine']['device']}")
    axes = figure.subplots(len(shapes), len(pages), squeeze=False)
    norm = TwoSlopeNorm(1.0, 0.9, 1.25)
    for shape, line in zip(shapes, axes, strict=True):
        for page, panel in zip(pages, line, strict=True):
            values = np.full((len(contexts), len(queries)), np.nan)
            for row in rows:
                if (row["num_heads"], row["num_kv_heads"], row["head_size"], row["page_size"]) == (*shape, page):
                    values[contexts.index(row["context"]), queries.index(row["query"])] = row["ratio"]
            image = panel.imshow(values, norm=norm, cmap="RdYlGn", aspect="auto", origin="lower")
            for (y, x), value in np.ndenumerate(values):
                if np.isfinite(value):
                    panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="x-small")
            panel.set_title(f"{shape[0]}/{shape[1]} heads of {shape[2]}, page {page}", fontsize="small")
            panel.set_xticks(range(len(queries)), [str(query) for query in queries], fontsize="x-small")
            panel.set_yticks(range(len(contexts)), [f"{context // 1000}k" for context in contexts], fontsize="x-small")
    figure.supxlabel("query tokens")
    figure.supylabel("context tokens")
    figure.colorbar(image, ax=axes, shrink=0.5, label="above 1: ours is faster")
    figure.savefig(file, dpi=120)


def _draw(panel: Axes, rows: list[dict[str, Any]], state: str) -> None:
    """A line for each kind and block size, a colour for each kind, dashes for the peers."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    palette = [colormaps["tab20"](index) for index in range(20)]
    colours = palette[::2] + palette[1::2]  # the ten strong ones first
    seen = set()
    for kind, block_size in dict.fromkeys((row["kind"], row["block_size"]) for row in rows):
        line = [row for row in rows if (row["kind"], row["block_size"]) == (kind, block_size)]
        colour = colours[kinds.index(kind) % len(colours)]
        for name, marker in {"": "o", **_PEER_MARKERS}.items():
            key = f"{name}_{state}_us" if name else f"{state}_us"
            points = sorted((row["bytes_moved"], row[key]) for row in line if key in row)
            if not points:
                continue
            megabytes, tb_per_s = zip(*((moved / 1e6, moved / us / 1e6) for moved, us in points), strict=True)
            label = f"{kind}, {name}" if name else kind
            (drawn,) = panel.plot(megabytes, tb_per_s, color=colour, marker=marker, markersize=4)
            drawn.set_linestyle("--" if name else "-")
            drawn.set_label("_" if label in seen else label)  # matplotlib leaves out of the legend what starts with _
            seen.add(label)
