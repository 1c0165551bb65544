"""`vllm-kda bench gather` on the CPU, and the logic of its timing with a clock of our own."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from vllm_kda_plugin import cli
from vllm_kda_plugin.bench import gather, plots, timing
from vllm_kda_plugin.bench.gather_cases import LARGE_SIZES, SMALL_SIZES, Buffers, Case, cases, make_buffers
from vllm_kda_plugin.kernels import loader

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
HEADER = re.compile(
    r"num_tokens: (\d+), num_heads: (\d+), head_size: (\d+), block_size: (\d+), num_blocks: (\d+), "
    r"dtype: (torch\.\w+)\n"
    r"\[Latency\] (gather_\w+): ([\d.]+) ms\n"
    r"\[Throughput\] (gather_\w+): ([\d.]+) GB/s\n"
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "choose_device", lambda: CPU)
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(timing, "_COPY_BYTES", {"cpu": 1 << 20})


@pytest.mark.usefixtures("on_cpu")
def test_command_prints_the_lines_of_2023_and_writes_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, plot_file = tmp_path / "gather.json", tmp_path / "gather.png"
    sizes = ["--num-tokens", "4", "8"]
    assert cli.main(["bench", "gather", *sizes, "--json", str(json_file), "--plot", str(plot_file)]) == 0
    said = capsys.readouterr().out
    assert said.count("No kernel runs on a CPU") == 1
    assert "cold" not in said
    report = json.loads(json_file.read_text())
    assert report["machine"]["device"] == "CPU"
    assert report["versions"]["torch"] == torch.__version__
    blocks = HEADER.findall(said)
    assert len(blocks) == len(report["cases"]) == 2 * (3 + 3 * 4 + 3)
    for row, (*sizes_said, dtype, entry, ms, same_entry, gb_per_s) in zip(report["cases"], blocks, strict=True):
        tokens, heads, head_size, block_size, num_blocks = map(int, sizes_said)
        assert (tokens, heads, head_size) == (row["tokens"], row["num_heads"], row["head_size"])
        assert (block_size, num_blocks) == (row["block_size"], row["num_blocks"])
        assert entry == same_entry == row["entry"]
        payload = 2 * tokens * heads * head_size * getattr(torch, dtype.removeprefix("torch.")).itemsize
        assert payload == row["bytes_written"]
        assert float(ms) == pytest.approx(row["hot_us"] / 1e3, abs=1e-5)
        assert float(gb_per_s) == pytest.approx(payload / (row["hot_us"] / 1e6) / 2**30, abs=1e-3)
        assert ("index_select_hot_us" in row) == (row["layout"] != "classic" and row["dtype"] == row["cache_dtype"])
        assert not row["peers_without_time"]
        assert "cold_us" not in row
        assert "reference_hot_us" not in row
    first = "num_tokens: 4, num_heads: 40, head_size: 128, block_size: 8, num_blocks: 1024, dtype: torch.float16\n"
    assert first in said
    check_png(plot_file)


@pytest.mark.parametrize("extension", ["png", "svg", "pdf"])
def test_plot_needs_the_json_alone(extension: str, tmp_path: Path) -> None:
    row = {"kind": "NHD", "block_size": 16, "bytes_moved": 10**6, "hot_us": 1.0, "cold_us": 2.0}
    rows: list[dict[str, Any]] = [
        row | {"index_select_hot_us": 2.0, "index_select_cold_us": 3.0},
        row | {"bytes_moved": 10**9, "hot_us": 300.0},
        row | {"block_size": 528},
        {"kind": "classic", "block_size": 8, "bytes_moved": 1, "skipped": "does not fit"},
    ]
    report = {"machine": {"device": "a GPU"}, "copy_tb_per_s": 4.2, "cases": rows}
    file = tmp_path / f"plot.{extension}"
    plots.save_gather(json.loads(json.dumps(report)), file)
    assert file.stat().st_size > 5000
    if extension == "png":
        check_png(file)
    if extension == "svg":
        drawn = file.read_text()
        assert drawn.count("<!-- NHD -->") == 1  # in the legend once, though it has two lines
        assert "<!-- NHD, index_select -->" in drawn
        assert "<!-- classic" not in drawn
    plots.save_gather(report | {"cases": rows[3:]}, file)


def check_png(file: Path) -> None:
    height, width, _ = imread(file, format="png").shape  # decodes all of it
    assert min(height, width) > 500


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--json", "none/x.json", "is no folder, so"),
        ("--json", ".", "is a folder, must be a file"),
        ("--plot", "none/x.png", "is no folder, so"),
        ("--plot", "x.gif", "must end in one of .pdf, .png, .svg"),
        ("--plot", "x", "must end in one of .pdf, .png, .svg"),
        ("--num-tokens", "0", "is '0', must be a whole number from 1"),
        ("--num-tokens", "many", "is 'many', must be a whole number from 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    option: str,
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gather, "run", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "gather", option, name])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert option in error
    assert said in error
    assert not list(tmp_path.iterdir())


def test_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "gather", "--json", str(tmp_path / "x.json")])


def test_plot_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from vllm_kda_plugin import cli\n"
        f"sys.exit(cli.main(['bench', 'gather', '--plot', {str(tmp_path / 'x.png')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == 'Plots need matplotlib; run: pip install "vllm-kda-plugin[bench]"\n'


def test_kernel_that_cannot_be_loaded_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str, device: int) -> None:
        raise loader.KernelUnavailable("no CuPy; run: pip install it")

    monkeypatch.setattr(timing, "choose_device", lambda: GPU)
    monkeypatch.setattr(loader, "load", load)
    assert cli.main(["bench", "gather"]) == 1
    assert capsys.readouterr().err == "no CuPy; run: pip install it\n"


def test_cases() -> None:
    gpu, cpu = list(cases(False, None)), list(cases(True, None))
    assert {case.tokens for case in cpu} == set(SMALL_SIZES)
    assert {case.tokens for case in gpu} == {*SMALL_SIZES, *LARGE_SIZES, 1 << 20, 4096 * 17}
    assert {case.tokens for case in cases(False, [5, 6])} == {5, 6}
    million = next(case for case in gpu if case.tokens == 1 << 20)
    assert (million.requests, million.bytes_moved, million.cache_bytes) == (1, 2**33, 2**32)
    short = next(case for case in gpu if case.requests > 1)
    assert (short.requests, short.tokens_each, short.num_blocks) == (4096, 17, 8192)
    packed = [case.tokens for case in gpu if (case.kind, case.block_size) == ("packed", 16)]
    assert sorted(packed) == [*SMALL_SIZES, *LARGE_SIZES, 1 << 20]
    for case in gpu:
        if case.order == "table" and case.kind != "packed":
            assert case.bytes_moved >= 64e6
    fp8 = next(case for case in gpu if "to bf16" in case.kind)
    assert fp8.bytes_moved == 65536 * 8 * 128 * 2 * 3


@pytest.mark.parametrize(
    "case", list(dict.fromkeys(cases(False, [37]))), ids=lambda case: f"{case.kind} {case.block_size}"
)
def test_calls_have_places_and_outputs_of_their_own(case: Case) -> None:
    case = dataclasses.replace(case, least_blocks=1)
    calls = list(make_buffers(case, 4, 2, CPU))
    outs = [out for call in calls for out in call.outs]
    assert len({out.data_ptr() for out in outs}) == len(outs)
    assert [call.caches[0].data_ptr() == calls[0].caches[0].data_ptr() for call in calls] == [True, False, True, False]
    for call in calls:
        assert len(call.caches[0]) == case.num_blocks
        assert len(call.slots) == len(call.slots.unique()) == 37
    ways, faults = gather.prepare(case, 3, CPU)
    assert not faults
    assert {len(calls_of_way) for calls_of_way in ways.values()} == {3}


def test_many_requests_are_gathered_request_after_request() -> None:
    case = Case("", "packed", "table", 17, 16, requests=5, num_heads=1)
    (buffers,) = make_buffers(case, 1, 1, CPU)
    ways, faults = gather.prepare(case, 1, CPU)
    assert set(ways) == {"ours", "index_select"}
    assert not faults
    assert buffers.tables[1].tolist() == [0, 17, 34, 51, 68, 85]
    assert len(buffers.slots) == 85


def test_fp8_to_be_dequantised_is_finite() -> None:
    for case in cases(True, [64]):
        if case.cache_dtype.itemsize == 1:
            (buffers,) = make_buffers(case, 1, 1, CPU)
            for cache in buffers.caches:
                assert bool(cache.float().isfinite().all())
                assert len(cache.view(torch.uint8).unique()) == 128


@pytest.mark.usefixtures("on_cpu")
def test_no_time_for_a_wrong_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Buffers.gather

    def wrong(self: Buffers, impl: Any, outs: Any) -> Any:
        return right(self, impl, outs if impl == "torch" else [out.clone() for out in outs])

    monkeypatch.setattr(Buffers, "gather", wrong)
    file = tmp_path / "x.json"
    assert cli.main(["bench", "gather", "--num-tokens", "4", "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "[Latency]" not in said
    assert "WRONG, so not timed: gather_cached_kv does not write what torch does" in said
    assert all("hot_us" not in row and "wrong" in row for row in json.loads(file.read_text())["cases"])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("raised", "said"), [(None, "does not write what torch does"), ("no", "fails: no")])
def test_a_wrong_peer_is_named_and_not_timed(
    raised: str | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def select() -> None:
        if raised:
            raise RuntimeError(raised)

    monkeypatch.setattr(Buffers, "index_select", lambda self, outs: select)
    monkeypatch.setattr(gather, "cases", lambda *_: [Case("HND", "HND", "table", 4, 16)])
    assert gather.run(None, None, None) == 0
    out = capsys.readouterr().out
    assert f"HND, page 16, 4 tokens: index_select is not timed, it {said}\n" in out
    assert "[Latency] gather_paged_kv" in out


@pytest.mark.usefixtures("on_cpu")
def test_a_case_that_does_not_fit_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*args: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gather, "prepare", too_large)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 8 * 10**9))
    assert gather.run(None, None, [4]) == 0
    assert "Skipped: does not fit into the 3.0 GB free on this GPU" in capsys.readouterr().out


class Clock:
    """A GPU of which every call takes as long as its cache is cold: 10 us, or 1 us on the buffers used last."""

    def __init__(self) -> None:
        self.last: object = None
        self.used_us = 0.0
        self.trace: list[str] = []

    def call(self, buffers: str) -> Callable[[], None]:
        def run() -> None:
            self.used_us += 1.0 if buffers == self.last else 10.0
            self.last = buffers
            self.trace.append(buffers)

        return run

    def capture(self, calls: Any, count: int) -> Callable[[], None]:
        return lambda: timing.launch_in_turn(calls, count)

    def replay(self, graph: Callable[[], None]) -> float:
        graph()  # as the real one, once before the clock starts
        before = self.used_us
        graph()
        return self.used_us - before


def test_hot_is_one_set_of_buffers_and_cold_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "_capture", clock.capture)
    monkeypatch.setattr(timing, "_time_replay", clock.replay)
    monkeypatch.setattr(timing, "ROUNDS", 3)
    rotations = {name: [clock.call(f"{name}{turn}") for turn in range(7)] for name in "ab"}
    rotations["alone"] = [clock.call("alone")]
    found = timing.measure(rotations, 1 << 30, GPU)
    assert found["a"] == found["b"] == timing.Timing(hot_us=1.0, cold_us=10.0)
    assert found["alone"] == timing.Timing(hot_us=1.0, cold_us=1.0)  # cold by itself: it moves more than the cache
    # 4 GiB a graph are 4 launches hot; cold, whole turns. Way after way in each round, each graph twice.
    turns = [[f"{name}{turn}" for turn in range(7)] * 2 for name in "ab"]
    a_round = [["a0"] * 8, turns[0], ["b0"] * 8, turns[1], ["alone"] * 8]
    assert clock.trace == functools.reduce(operator.iadd, [*a_round, *a_round[::-1], *a_round], [])


@pytest.mark.parametrize(("bytes_moved", "launches"), [(1, 200), (1 << 25, 128), (1 << 40, 4)])
def test_launches_a_graph(bytes_moved: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "_capture", clock.capture)
    monkeypatch.setattr(timing, "_time_replay", clock.replay)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    timing.measure({"a": [clock.call("a")]}, bytes_moved, GPU)
    assert len(clock.trace) == 2 * launches


def test_rotation_exceeds_four_times_the_l2_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(L2_cache_size=50 * 10**6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert timing.rotation_length(2_600_000, GPU) == 77
    assert timing.rotation_length(200 * 10**6, GPU) == 1
    assert timing.rotation_length(10**10, GPU) == 1
    assert timing.rotation_length(1, CPU) == 1


def test_medians_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 3)
    times = iter([5.0, 50.0, 1.0, 90.0, 3.0, 10.0])
    order: list[str] = []

    def time_one(thing: str) -> float:
        order.append(thing)
        return next(times)

    assert timing.interleaved_medians({1: "one", 2: "two"}, time_one) == {1: 5.0, 2: 10.0}
    assert order == ["one", "two", "two", "one", "one", "two"]


def test_copies_move_as_many_bytes_as_asked() -> None:
    for calls in timing.copies(4096, 3, CPU).values():
        assert len(calls) == 3
    copy, negate = (calls[1]() for calls in timing.copies(4096, 3, CPU).values())
    assert isinstance(copy, torch.Tensor)
    assert isinstance(negate, torch.Tensor)
    assert copy.numel() * copy.element_size() * 2 == negate.numel() * negate.element_size() * 2 == 4096
