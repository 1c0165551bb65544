"""``vllm-kda bench kda`` on a CPU: what is measured, told, written and drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kda_plugin.bench import kda, kda_cases, kda_overhead
from vllm_kda_plugin.bench.kda_cases import Call, Case, Reference, cases, draw
from vllm_kda_plugin.cli import main
from vllm_kda_plugin.kda.providers import PROVIDERS, TorchProvider

CPU = torch.device("cpu")
TINY = Case(5, "tiny", (20, 0, 3), "bounded", "slow")


@pytest.fixture(autouse=True)
def _small_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kda_cases, "SMALL_SEQUENCES", {"1x20": (20,), "skewed": (9, 1)})
    monkeypatch.setattr(kda_overhead, "TOKENS", (1, 16))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    yield
    if workspace := sys.modules.get("vllm.v1.worker.workspace"):
        workspace.reset_workspace_manager()


def test_all_that_is_asked_for_is_measured_on_a_gpu() -> None:
    measured = list(cases(on_cpu=False))
    assert {case.heads for case in measured} == {4, 12, 16, 32, 64, 96}
    lens = {case.sequences: case.lens for case in measured}
    assert lens.pop("skewed") == kda_cases.SKEWED
    assert lens == {
        "1x2048": (2048,),
        "1x8192": (8192,),
        "1x32768": (32768,),
        "8x1024": (1024,) * 8,
        "32x256": (256,) * 32,
    }
    assert {(case.gate, case.decay) for case in measured} == {
        (gate, decay) for gate in ("bounded", "softplus") for decay in ("fast", "slow")
    }
    assert len(measured) == len(set(measured)) == 6 * 6 * 4


def test_bytes_of_a_case() -> None:
    assert Case(12, "", (8192,), "bounded", "fast").bytes_moved == 12 * (8192 * 1282 + 128 * 1024)


@pytest.mark.parametrize("decay", ["fast", "slow"])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_errors_are_those_of_rounding(gate: str, decay: Any) -> None:
    inputs = draw(Case(5, "tiny", (20, 0, 3), gate, decay), CPU)
    call, reference = Call.make(inputs, PROVIDERS["torch"]), Reference(inputs)
    assert reference.heads == [0, 1, 3, 4]
    call()
    out, state = reference.errors(call)
    assert 1e-4 < out < 4e-3
    assert 0 < state < 1e-5
    call.out[0, 7, 3] = float("nan")
    assert not reference.errors(call)[0] < 1


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Wrong(TorchProvider):
        def run(self, call: Any) -> None:
            super().run(call)
            call.final_state.mul_(1.1)

    monkeypatch.setattr(kda, "PROVIDERS", {"torch": Wrong()})
    assert main(["bench", "kda"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    written, plot = tmp_path / "kda.json", tmp_path / "kda.png"
    assert main(["bench", "kda", "--json", str(written), "--plot", str(plot)]) == 0
    report = json.loads(written.read_text())
    assert len(report["cases"]) == 8
    for row in report["cases"]:
        assert row["providers"]["torch"]["us"] > 0
        assert row["providers"]["torch"]["error_out"] < 4e-3
        assert row["floor_us"] > 0
    assert plot.stat().st_size > 10_000
    told = capsys.readouterr().out
    assert "No kernel runs on a CPU" in told
    assert "flashkda, bounded gate: it needs a GPU" in told


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("matplotlib")
    written, plot = tmp_path / "overhead.json", tmp_path / "overhead.svg"
    assert main(["bench", "kda", "--overhead", "--json", str(written), "--plot", str(plot)]) == 0
    rows = json.loads(written.read_text())["cases"]
    assert [(row["provider"], row["tokens"], row["sequences"]) for row in rows] == [("torch", 1, 1), ("torch", 16, 8)]
    assert all(row["speedup"] == pytest.approx(row["before_ms"] / row["after_ms"]) for row in rows)
    assert plot.stat().st_size > 5_000
    told = capsys.readouterr().out
    assert "tokens  before (ms)  after (ms)   speedup\n     1 " in told
    assert "host and device together" in told


def test_both_ways_do_the_same() -> None:
    pytest.importorskip("vllm")
    ways = kda_overhead.make_ways(PROVIDERS["torch"], 16, CPU)
    assert list(ways) == ["before", "after"]
    pools = [way.args[[type(x) for x in way.args].index(torch.Tensor)] for way in ways.values()]  # type: ignore[attr-defined]
    outs, states = [], []
    for way, pool in zip(ways.values(), pools, strict=True):
        pool.copy_(torch.arange(pool.numel()).view_as(pool) % 7)
        out: Any = way()
        outs.append(out.clone())
        states.append(pool.clone())
    assert torch.equal(*outs)
    assert torch.equal(*states)


def test_what_was_measured_before_an_interruption_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written, measure, measured = tmp_path / "kda.json", kda.measure, 0

    def stop_at_the_third(*args: Any) -> dict[str, Any]:
        nonlocal measured
        measured += 1
        if measured == 3:
            assert len(json.loads(written.read_text())["cases"]) == 2
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(kda, "measure", stop_at_the_third)
    assert main(["bench", "kda", "--json", str(written)]) == 130
    assert len(json.loads(written.read_text())["cases"]) == 2
    assert "Interrupted" in capsys.readouterr().out
