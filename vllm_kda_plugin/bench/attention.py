"""``vllm-kda bench attention``: attention steps, ours beside vLLM's FLASH_ATTN; or what planning on this GPU rests on.

Ours is what serves with ``kda_plugin.gather`` = auto; ``VLLM_KDA_CALIBRATION`` and the like hold here as in an engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_kda_plugin.bench import calibrate, timing
from vllm_kda_plugin.bench.attention_cases import cases, peer_cases
from vllm_kda_plugin.bench.attention_report import show, summarize
from vllm_kda_plugin.bench.progress import progress
from vllm_kda_plugin.kernels import loader
from vllm_kda_plugin.kernels.gather_plan import KERNEL


class CannotMeasure(RuntimeError):
    """Something that measuring needs is not here; the message says what."""


def run(json_file: Path | None, plot_file: Path | None, calibration: Path | None) -> int:
    """Measure, print and write; returns 1 if a result is wrong or nothing can be measured, else 0.

    Args:
        json_file: where all figures go, if anywhere; written after each shape and page too.
        plot_file: where the plot goes, if anywhere; its format is that of its extension.
        calibration: measure what planning rests on, in place of the grid, and write it here.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        device = _prepare(plot_file)
    except CannotMeasure as error:
        print(error, file=sys.stderr)
        return 1
    if calibration is not None:
        measure_calibration(device, calibration)
        return 0
    report = measure_all(device, json_file)
    show(report)
    if plot_file is not None:
        from vllm_kda_plugin.bench import plots

        plots.save_attention(report, plot_file)
    return int(report["summary"]["wrong"] > 0)


def measure_all(device: torch.device, json_file: Path | None = None) -> dict[str, Any]:
    """Measure the grid, then the peers; returns what --json writes."""
    from vllm_kda_plugin.bench.attention_measure import measure_grid, measure_peers
    from vllm_kda_plugin.bench.attention_steps import Clock

    report: dict[str, Any] = {**timing.describe(device), "cases": [], "peers": []}
    clock, begin = Clock(), time.monotonic()
    grid, peers = list(cases()), list(peer_cases())

    def keep() -> None:
        report["summary"] = summarize(report["cases"])
        report["seconds"] = round(time.monotonic() - begin)
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    before: tuple[Any, ...] = ()
    with progress(len(grid)) as tell:
        for case, row in zip(grid, measure_grid(grid, device, clock, tell), strict=True):
            if before not in ((), (case.shape, case.page)):
                keep()
            before = case.shape, case.page
            report["cases"].append(row)
    keep()
    with progress(2 * len(peers)) as tell:
        report["peers"] = list(measure_peers(peers, device, clock, tell))
    keep()
    return report


def measure_calibration(device: torch.device, file: Path) -> None:
    """Measure what planning rests on, print it and write what ``kda_plugin.calibration`` reads."""
    from vllm_kda_plugin.bench import calibrate_measure as measuring
    from vllm_kda_plugin.bench.attention_steps import Clock

    clock = Clock()
    points: list[calibrate.Point] = []
    kinds = list(calibrate.places())
    with progress(len(kinds) * len(calibrate.QUERIES) * len(calibrate.CONTEXTS)) as tell:
        for shape, page, cache in kinds:
            try:
                points += measuring.measure_points(shape, page, cache, device, clock, tell)
            except (RuntimeError, AssertionError) as error:
                if cache == "16-bit":
                    raise
                # Without a rate such layers stay with the stock call.
                print(f"{shape}, page {page}, {cache} is not measured: {error}", file=sys.stderr)
            torch.cuda.empty_cache()
        gathers = measuring.measure_gathers(device, clock)
        call_us = measuring.measure_call_us(device, clock)
        host = measuring.measure_host_us(device, clock)
    found = calibrate.solve(torch.cuda.get_device_name(device), points, gathers, call_us, host)
    found.save(file, [point.as_json() for point in points])
    calibrate.show(found, points)


def _prepare(plot_file: Path | None) -> torch.device:
    """The GPU, with all that measuring needs."""
    device = timing.choose_device()
    if device.type != "cuda":
        raise CannotMeasure(
            "vllm-kda bench attention measures FlashAttention on an NVIDIA GPU, and torch finds none here"
        )
    try:
        from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
    except ImportError as error:
        said = 'vllm-kda bench attention needs vLLM; run: pip install "vllm-kda-plugin[cuda13]"'
        raise CannotMeasure(f"{said} ({error})") from None
    if not is_flash_attn_varlen_func_available():
        raise CannotMeasure("this vLLM comes without FlashAttention, beside which attention is measured")
    if plot_file is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise CannotMeasure('Plots need matplotlib; run: pip install "vllm-kda-plugin[bench]"') from None
    try:
        loader.load(KERNEL, device.index)
    except loader.KernelUnavailable as error:
        raise CannotMeasure(str(error)) from None
    return device
