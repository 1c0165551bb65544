"""The plots of the benchmarks, from what their --json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

_PEER_MARKERS = {"reference": "v", "index_select": "x", "cp_gather_cache": "+"}
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
