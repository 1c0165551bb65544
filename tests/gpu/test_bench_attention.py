"""``vllm-kda bench attention`` on a few small cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.config")

from vllm.v1.worker import workspace as vllm_workspace

from vllm_kda_plugin.bench import attention_measure, calibrate_measure
from vllm_kda_plugin.bench.attention_cases import SHAPES, Case
from vllm_kda_plugin.bench.attention_steps import Clock

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def workspace() -> Iterator[None]:
    """Of this test alone."""
    vllm_workspace.reset_workspace_manager()
    yield
    vllm_workspace.reset_workspace_manager()


def ignore(words: str) -> None:
    """In place of a progress bar."""


def test_cells_are_right_and_timed() -> None:
    cases = [
        Case(SHAPES[0], 16, ((1, 1000),)),
        Case(SHAPES[0], 16, ((2048, 0),)),
        Case(SHAPES[0], 16, ((1, 100), (1, 200), (300, 0), (2048, 30_000)), "mixed"),
    ]
    rows = list(attention_measure.measure_grid(cases, DEVICE, Clock(), ignore))
    for row in rows:
        assert "wrong" not in row, row["wrong"]
        assert min(row["stock_us"], row["ours_us"]) > 0
        assert row["ratio"] > 0.5
    assert rows[0]["path"] == "paged"
    if torch.cuda.get_device_name() == "NVIDIA H200":
        assert [row["path"] for row in rows[1:]] == ["fresh", "paged + gather"]
        gpu: dict[str, Any] = rows[2]["gpu_us"]
        assert gpu["gather"] + gpu["attention"] < gpu["ours"]


@pytest.mark.parametrize("cache", ["16-bit", "fp8"])
def test_points_of_a_calibration(cache: Any) -> None:
    points = list(
        calibrate_measure.measure_points(SHAPES[0], 16, cache, DEVICE, Clock(), ignore, (512, 2048), (0, 4_000))
    )
    assert len(points) == 4
    for point in points:
        assert 50 < point.tflops < 1500
        assert -0.7 < point.penalty < 1
        assert point.ours_us < 2 * (point.contiguous_us + point.gather_us) + 50


def test_a_call_more() -> None:
    assert -50 < calibrate_measure.measure_call_us(DEVICE, Clock()) < 500
    for moved, us in calibrate_measure.measure_gathers(DEVICE, Clock()):
        assert moved / us / 1e6 < 30
