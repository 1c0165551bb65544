"""The plot of ``vllm-kda bench serve``, from what its --json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def save(report: dict[str, Any], file: Path) -> None:
    """Plot the medians of both engines as bars, all samples as dots, and the ratios above them.

    Args:
        report: what ``vllm-kda bench serve --json`` writes.
        file: where to; the format is that of its extension.
    """
    names = [engine["backend"] for engine in report["engines"]]
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(f"vLLM's engine on {report['machine']['device']}")
    rows = [
        (f"{row['prompt_tokens']:,}", row["ratio"], row["samples_s"], row["median_s"]) for row in report["first_token"]
    ]
    decode = report["decode"]
    batch = f"{report['load']['decode_requests']} requests"
    speeds = [(batch, decode["ratio"], decode["samples_tokens_per_s"], decode["median_tokens_per_s"])]
    panels = figure.subplots(1, 2, width_ratios=(3, 1))
    for panel, bars, title in zip(panels, (rows, speeds), ("time to first token, s", "decode, tokens/s"), strict=True):
        for place, (_, ratio, samples, medians) in enumerate(bars):
            for index, name in enumerate(names):
                at = place + 0.4 * index - 0.2
                panel.bar(at, medians[index], 0.38, color=f"C{index}", label=name if place == 0 else "_")
                panel.plot([at] * len(samples[index]), samples[index], ".", color="black", markersize=3)
            panel.annotate(f"{ratio:.3f}x", (place, max(map(max, samples))), ha="center", va="bottom")
        panel.set_xticks(range(len(bars)), [bar[0] for bar in bars])
        panel.set_title(title)
        panel.margins(y=0.1)
    panels[0].set_xlabel("tokens of the prompt")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.savefig(file, dpi=150)
