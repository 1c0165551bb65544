"""``vllm-kda bench attention`` as far as neither a GPU nor vLLM is needed: cases, summary, plot, solving, errors."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from vllm_kda_plugin import cli
from vllm_kda_plugin.attention.planner import Calibration, Planner, Rate, load
from vllm_kda_plugin.bench import attention, attention_report, calibrate, plots, timing
from vllm_kda_plugin.bench.attention_cases import BATCHES, CONTEXTS, PAGES, QUERIES, SHAPES, Case, cases, peer_cases
from vllm_kda_plugin.bench.calibrate import Point


def test_the_grid_is_the_issues() -> None:
    grid = list(cases())
    single = [case for case in grid if len(case.requests) == 1]
    assert len(single) == len(SHAPES) * len(PAGES) * len(CONTEXTS) * len(QUERIES) == 576
    assert len(set(grid)) == len(grid) == 576 + 4 * len(BATCHES)
    places = [(case.shape, case.page) for case in grid]
    assert len([i for i, place in enumerate(places) if i == 0 or places[i - 1] != place]) == 24  # side by side
    for case in grid:
        assert case.tokens <= 8192
        queries = [query for query, _ in case.requests]
        assert queries == sorted(queries, key=lambda query: query > 1), "decodes come first"
    assert sum(case.decodes_only for case in grid) == 96 + 4
    assert {case.page for case in peer_cases()} == {16}
    assert len(list(peer_cases())) == len(SHAPES) * 2 * len(QUERIES)


def test_blocks_of_a_case() -> None:
    assert Case(SHAPES[0], 16, ((1, 15), (1, 16), (40, 0))).blocks == 1 + 2 + 3


def row(ratio: float, **changed: Any) -> dict[str, Any]:
    return {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "page_size": 16,
        "query": 2048,
        "context": 30_000,
        "size": "2,048 after 30,000",
        "batch": "one request",
        "path": "gather",
        "ratio": ratio,
        "ratio_quartiles": [ratio, ratio],
        "stock_us": 100.0 * ratio,
        "ours_us": 100.0,
        "agreement": {"ours": {"max": 0.0, "row": 0.0}, "splits": {"max": 0.0, "row": 0.0}},
        **changed,
    }


def test_summary() -> None:
    rows = [
        row(1.2),
        row(1.3, num_heads=8, num_kv_heads=1, query=8192, context=120_000),
        row(1.05, num_heads=16, num_kv_heads=16),
        row(1.1, head_size=64),
        row(5.0, page_size=128),  # in no mean
        row(1.14, context=0),
        row(0.97, query=1),
        row(0.96, query=512, wrong="differs"),
        row(1.0, query=None, context=None, size="mixed"),
    ]
    found = attention_report.summarize(rows)
    means = [(mean["cells"], mean["mean"]) for mean in found["means"].values()]
    assert means[0] == (2, pytest.approx(math.sqrt(1.2 * 1.3)))
    assert means[1] == (4, pytest.approx((1.2 * 1.3 * 1.05 * 1.1) ** 0.25))
    assert means[2] == (1, pytest.approx(1.14))
    assert [mean["at_least"] for mean in found["means"].values()] == [1.10, 1.07, 1.12]
    assert (found["lowest"]["ratio"], found["below"], found["cells"], found["wrong"]) == (0.96, 2, 9, 1)
    lines = attention_report.summary_lines(found)
    assert "lowest: 0.960, 32/8 D128, page 16, 2,048 after 30,000" in "\n".join(lines)
    assert lines[-1] == "WRONG: 1 cells"


def test_summary_of_nothing() -> None:
    found = attention_report.summarize([])
    assert found["lowest"] is None
    assert attention_report.summary_lines(found) == ["below 0.98: 0 of 0 cells"]


@pytest.mark.parametrize("extension", ["png", "svg"])
def test_report_is_shown_and_plotted(extension: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(0.9 + 0.01 * i, page_size=page, query=query, context=context)
        for page in (16, 528)
        for i, (query, context) in enumerate([(1, 0), (2048, 0), (1, 120_000), (2048, 120_000)])
    ]
    rows[1]["wrong"] = "differs"
    rows[2]["gpu_us"] = {"stock": 10.0, "ours": 9.0, "gather": 1.0, "attention": 7.5}
    rows.append(row(1.0, query=None, context=None, size="mixed"))
    peers = [
        {"name": "FLASHINFER", "error": "not importable: no"},
        {"name": "TRITON_ATTN", **rows[0], "error": "RuntimeError: no"},
        {"name": "TRITON_ATTN", **rows[0], "us": 3.0, "difference": {"row": 0.001}},
    ]
    summary = attention_report.summarize(rows)
    report = {"machine": {"device": "a GPU"}, "versions": {}, "cases": rows, "peers": peers, "summary": summary}
    report = json.loads(json.dumps(report))
    attention_report.show(report)
    said = capsys.readouterr().out
    assert "WRONG" in said
    assert "FLASHINFER: not importable: no" in said
    file = tmp_path / f"x.{extension}"
    plots.save_attention(report, file)
    if extension == "png":
        assert min(imread(file, format="png").shape[:2]) > 200
    else:
        assert "<!-- 0.93 -->" in file.read_text()


# ---- Calibration ----------------------------------------------------------------------------------------------------


def synthetic(truth: Calibration) -> list[Point]:
    """What a GPU that is as the planner takes it to be would be measured as."""
    points = []
    for shape, page, cache in calibrate.places():
        for query in calibrate.QUERIES:
            for context in calibrate.CONTEXTS:
                point = Point(shape, page, cache, query, context, 1.0, 1.0, 0.0, 1.0)
                plan = Planner(point.layer, "always", truth, 256 << 20)
                attention_us, costs = plan.attention_us(query, context), plan.costs_us(query, context)
                gather_us = truth.gather_us + point.moved_bytes / (truth.gather_tbps * 1e6) if context else 0.0
                points.append(
                    dataclasses.replace(
                        point,
                        stock_us=costs["paged"],
                        contiguous_us=attention_us,
                        gather_us=gather_us,
                        ours_us=costs["gather" if context else "fresh"],
                    )
                )
    return points


HOST = calibrate.HostTimes(1.0, 1.0, 1.0)
KINDS = list(
    dict.fromkeys(
        calibrate._kind(Point(shape, page, cache, 1, 0, 1.0, 1.0, 0.0, 1.0))
        for shape, page, cache in calibrate.places()
    )
)


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_solving_recovers_the_rates(data: st.DataObject) -> None:
    numbers = st.floats(0.0, 0.3).map(lambda number: round(number, 3))
    rates = tuple(Rate(*kind, data.draw(st.floats(200, 700)), data.draw(numbers), data.draw(numbers)) for kind in KINDS)
    truth = Calibration("a GPU", data.draw(st.floats(2, 5)), data.draw(st.floats(1, 6)), 10.0, *HOST, rates)
    points = synthetic(truth)
    found = calibrate.solve("a GPU", points, [(10**5, truth.gather_us + 0.1 / truth.gather_tbps)], 10.0, HOST)
    assert found.gather_tbps == pytest.approx(truth.gather_tbps, rel=1e-3)
    assert found.gather_us == pytest.approx(truth.gather_us, rel=1e-2)
    assert found.call_us == 10.0
    assert [(rate.head_size, rate.group, rate.page, rate.cache) for rate in found.rates] == KINDS
    for rate, wanted in zip(found.rates, rates, strict=True):
        assert rate.attention_tflops == pytest.approx(wanted.attention_tflops)
        assert rate.paged_penalty == pytest.approx(wanted.paged_penalty, abs=1e-6)
        assert rate.fresh_penalty == pytest.approx(wanted.fresh_penalty, abs=1e-6)


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32 - 1))
def test_no_request_measured_to_be_slower_is_planned(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    truth = Calibration("a GPU", 4.1, 3.0, 12.0, *HOST, tuple(Rate(*kind, 600.0, 0.1, 0.1) for kind in KINDS))
    points = [
        dataclasses.replace(
            point, stock_us=point.stock_us * float(torch.empty(()).normal_(1.0, 0.08, generator=generator))
        )
        for point in synthetic(truth)
        if point.shape == SHAPES[0]
    ]
    found = calibrate.solve("a GPU", points, [], 12.0, HOST)
    ratios: dict[object, list[float]] = {}
    for point in points:
        key = point.cache, point.layer.page, point.query, point.context
        ratios.setdefault(key, []).append(point.ours_us / point.stock_us)
    for point in points:
        [way] = calibrate.planner(point, found).choose([(point.query, point.context)])
        over_pages = statistics.median(ratios[point.cache, point.layer.page, point.query, point.context])
        assert way == "paged" or over_pages <= 1


@pytest.mark.parametrize(
    "gathers",
    [[(1000, 50.0), (2000, 20.0), (4000, 10.0)], [(1000, 0.05), (10**9, 200.0)], [(10**6, 5.0), (10**6, 9.0)]],
)
def test_times_of_gathers_that_scatter_give_possible_speeds(gathers: list[tuple[int, float]]) -> None:
    found = calibrate.solve("a GPU", [], gathers, 12.0, HOST)
    assert 0 < found.gather_tbps < math.inf
    assert 0 < found.gather_us < math.inf


def test_calibration_keeps_its_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = Calibration("a GPU", 4.1, 3.0, 12.0, *HOST, tuple(Rate(*kind, 600.0, 0.1, 0.1) for kind in KINDS))
    points = synthetic(truth)
    found = calibrate.solve("a GPU", points, [], 0.0, HOST)
    assert found.call_us > 0
    file = tmp_path / "x.json"
    found.save(file, [point.as_json() for point in points])
    assert load(file) == found
    kept = json.loads(file.read_text())["points"]
    assert len(kept) == len(points)
    assert kept[0]["num_heads"] == 32
    assert kept[0]["penalty"] == pytest.approx(0.1)
    calibrate.show(found, points)
    assert "8,192 after 120,000" in capsys.readouterr().out


# ---- The command ----------------------------------------------------------------------------------------------------


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(timing, "choose_device", lambda: torch.device("cpu"))
    assert cli.main(["bench", "attention"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "vllm-kda bench attention measures FlashAttention on an NVIDIA GPU, and torch finds none here\n"
    )


def test_without_vllm_one_line_says_so() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import torch\n"
        "from vllm_kda_plugin import cli\n"
        "from vllm_kda_plugin.bench import timing\n"
        "timing.choose_device = lambda: torch.device('cuda', 0)\n"
        "sys.exit(cli.main(['bench', 'attention']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("vllm-kda bench attention needs vLLM; run: pip install")
    assert done.stderr.count("\n") == 1


def test_calibration_is_measured_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["bench", "attention", "--calibrate", str(tmp_path / "a.json"), "--json", str(tmp_path / "b.json")]
    assert cli.main(argv) == 2
    assert "--calibrate measures no grid" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_command_is_given_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def run(*arguments: object) -> int:
        asked.extend(arguments)
        return 3

    monkeypatch.setattr(attention, "run", run)
    assert cli.main(["bench", "attention", "--json", "a.json", "--plot", "b.svg"]) == 3
    assert cli.main(["bench", "attention", "--calibrate", "c.json"]) == 3
    assert asked == [Path("a.json"), Path("b.svg"), None, None, None, Path("c.json")]


def test_exit_code_is_1_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attention, "_prepare", lambda plot: torch.device("cuda", 0))
    for rows, code in (([row(1.0)], 0), ([row(1.0), row(1.0, wrong="differs")], 1)):
        summary = attention_report.summarize(rows)
        report = {"machine": {"device": "a GPU"}, "versions": {}, "cases": rows, "peers": [], "summary": summary}
        monkeypatch.setattr(attention, "measure_all", lambda *_, report=report: report)
        assert attention.run(None, tmp_path / "x.png", None) == code
