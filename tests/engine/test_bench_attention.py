"""``vllm-kda bench attention`` on the CPU: vLLM's classes, FlashAttention's kernels in torch, a clock without a GPU."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.worker import workspace as vllm_workspace

from tests.support.flash import attention as attend
from tests.support.flash import flash_attn_varlen_func
from vllm_kda_plugin.attention import planner
from vllm_kda_plugin.bench import (
    attention,
    attention_layers,
    attention_measure,
    attention_report,
    attention_steps,
    calibrate_measure,
    plots,
)
from vllm_kda_plugin.bench.attention_cases import Case, Shape, Tensors

CPU = torch.device("cpu")
SMALL = Shape(4, 2, 128)


class CpuClock(attention_steps.Clock):
    """The host's clock in place of the GPU's; a graph is the calls themselves."""

    def __init__(self) -> None:
        self.captured = 0

    def drain(self) -> None:
        pass

    def hold(self) -> None:
        pass

    def event(self) -> Any:
        return Event()

    def capture(self, calls: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        return calls


class Event:
    """As ``torch.cuda.Event``."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Stock:
    """Stands for ``FlashAttentionImpl.forward``."""

    error = 0.0

    def forward(
        self,
        impl: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: Any,
        output: Any,
        *_: Any,
    ) -> None:
        starts, page = metadata.query_start_loc.tolist(), kv_cache.shape[2]
        size = impl.head_size
        for row, (length, (first, end)) in enumerate(
            zip(metadata.seq_lens.tolist(), itertools.pairwise(starts), strict=True)
        ):
            blocks = metadata.block_table[row, : -(-length // page)].long()
            packed = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
            output[first:end], _ = attend(query[first:end], packed[..., :size], packed[..., size:], scale=impl.scale)
        if metadata.max_num_splits != 1:
            output += self.error


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    """An H200 that is none."""
    paged = Stock()
    monkeypatch.setattr(stock, "get_flash_attn_version", lambda *_, **__: 3)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda *_, **__: 3)
    monkeypatch.setattr(stock, "get_scheduler_metadata", lambda **asked: torch.arange(5), raising=False)
    monkeypatch.setattr(stock.FlashAttentionImpl, "dcp_world_size", 1, raising=False)
    monkeypatch.setattr(stock.FlashAttentionImpl, "forward", lambda impl, *args: paged.forward(impl, *args))
    monkeypatch.setattr(stock, "get_dcp_world_size_and_rank", lambda *_: (1, 0), raising=False)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(attention_steps, "_BUDGET_US", 0)
    monkeypatch.setattr(calibrate_measure, "_BUDGET_US", 0)
    monkeypatch.setenv("VLLM_KDA_GATHER_WORKSPACE_MIB", "1")
    vllm_workspace.reset_workspace_manager()
    yield paged
    vllm_workspace.reset_workspace_manager()


CASES = [
    Case(SMALL, 16, ((1, 40),)),
    Case(SMALL, 16, ((40, 0),)),
    Case(SMALL, 16, ((30, 70),)),
    Case(SMALL, 16, ((1, 9), (1, 30), (20, 0), (9, 50)), "mixed"),
    Case(SMALL, 64, ((1, 9), (1, 30)), "decodes"),
]


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells this small gather only if told to."""
    made = attention_layers.ours
    monkeypatch.setattr(attention_layers, "ours", lambda shape, page, device: made(shape, page, device, "always"))


def test_the_grid_is_measured_and_told(
    standing_in: Stock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    always(monkeypatch)
    clock = CpuClock()
    told: list[str] = []
    monkeypatch.setattr(attention_steps, "Clock", lambda: clock)
    monkeypatch.setattr(attention, "cases", lambda: iter(CASES))
    monkeypatch.setattr(attention, "peer_cases", lambda: iter(CASES[1:3]))
    made = attention_measure.measure_grid

    def listening(cases: Any, device: Any, clock: Any, tell: Any) -> Any:
        def heard(words: str) -> None:
            told.append(words)
            tell(words)

        return made(cases, device, clock, heard)

    monkeypatch.setattr(attention_measure, "measure_grid", listening)
    file = tmp_path / "x.json"
    report = attention.measure_all(CPU, file)
    assert json.loads(file.read_text()) == json.loads(json.dumps(report))
    assert told[2] == "4/2 D128, page 16, 30 after 70"
    assert [row["path"] for row in report["cases"]] == ["paged", "fresh", "gather", "paged + fresh + gather", "paged"]
    assert clock.captured == 6  # of two cases stock and ours, and stock once to see how long it takes
    for row, case in zip(report["cases"], CASES, strict=True):
        assert "wrong" not in row
        lower, upper = row["ratio_quartiles"]
        assert lower <= row["ratio"] <= upper
        assert row["cuda_graph"] is case.decodes_only
        assert row["rounds"] in ((3, 9) if row["path"] == "paged" else (3,))
        assert row["agreement"]["splits"]["max"] == 0
        assert ("gpu_us" in row) == (row["path"] != "paged")
    assert set(report["cases"][3]["gpu_us"]) == {"stock", "ours", "gather", "attention"}
    assert set(report["cases"][1]["gpu_us"]) == {"stock", "ours", "attention"}
    for row in report["peers"]:
        assert "error" in row  # neither runs on a CPU
    attention_report.show(report)
    assert "paged + fresh + gather" in capsys.readouterr().out
    plots.save_attention(report, tmp_path / "x.png")


@pytest.mark.parametrize("slower", [0.0, 0.1, -0.1])
def test_more_rounds_where_the_same_calls_seem_to_differ(
    standing_in: Stock, monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    """Either way, or a lucky round would stay and an unlucky one be mended."""
    clock = CpuClock()

    def us(self: attention_steps.Step) -> float:
        self.samples.append(100.0 * (1 + slower * (self.backend is backends[1]) + 1e-4 * len(self.samples)))
        self.builds.append(1.0)
        self.sends.append(1.0)
        return self.samples[-1]

    monkeypatch.setattr(attention_steps.Step, "__call__", us)
    backends = attention_layers.stock(SMALL, 16, CPU), attention_layers.ours(SMALL, 16, CPU)
    row = attention_measure.measure(*backends, Tensors(CASES[:1], 8, CPU).batch(CASES[0]), clock)
    assert row["path"] == "paged"
    assert row["rounds"] == (9 if slower else 3)
    assert row["ratio"] == pytest.approx(1 / (1 + slower), rel=1e-2)


def test_a_wrong_result_is_marked(standing_in: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    made = attention_layers.stock
    batch = Tensors([CASES[2]], 8, CPU).batch(CASES[2])
    backends = made(SMALL, 16, CPU), attention_layers.ours(SMALL, 16, CPU)
    assert "wrong" not in attention_measure.agreement(*backends, batch)
    batch.caches[0][batch.common.block_table_tensor[0, 2].long()] += 3.0
    monkeypatch.setattr("vllm_kda_plugin.attention.calls.Contiguous.run", lambda self, *args, **_: args[-1].fill_(0.0))
    found = attention_measure.agreement(*backends, batch)
    assert "of a row's largest value" in found["wrong"]
    monkeypatch.setattr(
        "vllm_kda_plugin.attention.calls.Contiguous.run", lambda self, *args, **_: args[-1].fill_(torch.nan)
    )
    assert "wrong" in attention_measure.agreement(*backends, batch)


def test_stock_runs_that_differ_allow_for_more(standing_in: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    standing_in.error = 0.2
    batch = Tensors([CASES[2]], 8, CPU).batch(CASES[2])
    found = attention_measure.agreement(
        attention_layers.stock(SMALL, 16, CPU), attention_layers.ours(SMALL, 16, CPU), batch
    )
    assert found["splits"]["max"] == pytest.approx(0.2, abs=0.01)
    assert found["ours"]["max"] == pytest.approx(0.2, abs=0.01)
    assert "wrong" not in found


@pytest.mark.parametrize("fp8", [False, True])
def test_a_batch_holds_what_the_step_computed(fp8: bool) -> None:
    case = CASES[3]
    tensors = Tensors([case, Case(SMALL, 16, ((50, 100),))], 2, CPU, fp8)
    batch = tensors.batch(case)
    assert tensors.num_blocks == 11
    assert batch.common.query_start_loc.tolist() == [0, 1, 2, 22, 31]
    assert batch.common.seq_lens.tolist() == [10, 31, 20, 59]
    used = batch.common.block_table_tensor[batch.common.block_table_tensor > 0]
    assert len(used) == len(used.unique()) == 1 + 2 + 2 + 4
    last = batch.common.block_table_tensor[3, 58 // 16]
    for layer in range(2):
        slot = batch.caches[layer][last, :, 58 % 16]
        slot = slot.view(torch.float8_e4m3fn) if fp8 else slot
        wanted = torch.cat([batch.key[layer][30], batch.value[layer][30]], dim=-1)
        assert torch.equal(slot.float(), (wanted.to(torch.float8_e4m3fn) if fp8 else wanted).float())
    assert not torch.equal(batch.key[0], batch.key[1])
    assert batch.caches[0].shape == (11, 2, 16, 256)
    assert batch.caches[0].transpose(1, 2).is_contiguous()


def test_points_of_a_calibration_are_measured(standing_in: Stock, tmp_path: Path) -> None:
    points = list(
        calibrate_measure.measure_points(SMALL, 16, "16-bit", CPU, CpuClock(), lambda _: None, (20, 40), (0, 100))
    )
    assert [(point.query, point.context) for point in points] == [(20, 0), (40, 0), (20, 100), (40, 100)]
    assert all((point.gather_us > 0) == (point.context > 0) for point in points)
    assert all(min(point.stock_us, point.contiguous_us, point.ours_us) > 0 for point in points)


def test_calibration_is_written_for_the_planner(
    standing_in: Stock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = calibrate_measure.measure_points
    monkeypatch.setattr(attention.calibrate, "places", lambda: iter([(SMALL, 16, "16-bit")]))
    short = functools.partial(made, queries=(20,), contexts=(0, 100))
    monkeypatch.setattr(calibrate_measure, "measure_points", short)
    monkeypatch.setattr(calibrate_measure, "SHAPES", (SMALL,))
    monkeypatch.setattr(calibrate_measure, "_SPLIT", (([(20, 40)], [(20, 40)]), ([(1, 20)] * 3, [(20, 40)])))
    monkeypatch.setattr(calibrate_measure, "GATHERED", (16, 32))
    monkeypatch.setattr(attention_steps, "Clock", CpuClock)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    file = tmp_path / "h200.json"
    attention.measure_calibration(CPU, file)
    loaded = planner.for_gpu("NVIDIA H200", str(file))
    assert loaded is not None
    (rate,) = loaded.rates
    assert (rate.head_size, rate.group, rate.page, rate.cache) == (128, 2, "other", "16-bit")
    assert len(json.loads(file.read_text())["points"]) == 2
    assert "20 after 100" in capsys.readouterr().out
