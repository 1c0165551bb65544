"""Which way requests go: predictions, their order, and the file that they come from."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kda_plugin.attention import planner as planning
from vllm_kda_plugin.attention.planner import H200, Layer, Planner, Request

GQA = Layer(num_heads=32, num_kv_heads=8, head_size=128, page_size=16)
MIB = 1 << 20


def make(layer: Layer = GQA, mode: Any = "auto", calibration: Any = H200, workspace: int = 256 * MIB) -> Planner:
    return Planner(layer, mode, calibration, workspace)


layers = st.builds(
    Layer,
    num_heads=st.sampled_from([8, 16, 32, 64]),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_size=st.sampled_from([64, 96, 128, 256]),
    page_size=st.sampled_from([16, 64, 80, 128, 528, 1056]),
    window=st.none() | st.integers(0, 5000),
    can_fresh=st.booleans(),
    can_chunk=st.booleans(),
)
prefills = st.tuples(st.integers(2, 20_000), st.just(0) | st.integers(0, 200_000))
steps = st.lists(st.none() | prefills, min_size=1, max_size=7)
# Whose host is never waited for.
GPU_BOUND = dataclasses.replace(H200, paged_host_us=1e-9, fresh_host_us=1e-9, gather_host_us=1e-9)
planners = st.builds(
    make, layers, st.just("auto"), st.sampled_from([H200, GPU_BOUND]), st.integers(0, 512).map(lambda mib: mib * MIB)
)


@given(planners, steps)
def test_never_slower_than_stock_by_its_own_prediction(planner: Planner, step: list[Request]) -> None:
    ways = planner.choose(step)
    stock = planner.cost_of(step, ["paged"] * len(step))
    assert planner.cost_of(step, ways) <= stock
    paged: list[planning.Way] = ["paged"] * len(step)
    ours, theirs = (max(planner.cost_of(step, way), planner.host_us(step, way)) for way in (ways, paged))
    assert ours <= theirs
    assert all(way == "paged" for way, request in zip(ways, step, strict=True) if request is None)


@given(planners, st.lists(st.none() | prefills, min_size=1, max_size=4))
def test_nothing_is_faster_by_more_than_the_margin(planner: Planner, step: list[Request]) -> None:
    planner = dataclasses.replace(planner, calibration=GPU_BOUND)
    chosen = planner.cost_of(step, planner.choose(step))
    every: Any = itertools.product(
        *(["paged"] if request is None else ["paged", "fresh", "gather"] for request in step)
    )
    fastest = min(planner.cost_of(step, ways) for ways in every)
    assert chosen * (1 - planning._MARGIN) <= fastest * (1 + 1e-9)


@given(layers, st.integers(2, 16_000), st.integers(0, 16_000), st.integers(0, 150_000))
def test_more_queries_never_turn_a_gather_down(layer: Layer, query: int, more: int, context: int) -> None:
    planner = make(layer, calibration=GPU_BOUND, workspace=1 << 40)
    if planner.choose([(query, context)]) == ["gather"]:
        assert planner.choose([(query + more, context)]) == ["gather"]


@given(planners, prefills)
def test_fits_the_workspace(planner: Planner, request: tuple[int, int]) -> None:
    query, context = request
    parts, layer = planner.parts(query, context), planner.layer
    if parts.calls == 1 and layer.keys(query, context) <= planner.capacity:
        assert layer.keys(query, context) * layer.row_bytes <= planner.workspace_bytes
    elif parts.of == "heads":
        heads = -(-layer.num_kv_heads // parts.calls)
        assert 1 < parts.calls <= layer.num_kv_heads
        assert layer.keys(query, context) * heads * layer.row_bytes // layer.num_kv_heads <= planner.workspace_bytes
    elif parts.calls:
        room = planner.chunk_tokens(query) * planner.layer.row_bytes
        assert 0 < room <= planner.workspace_bytes - planner.partial_bytes(query)
        assert planner.layer.window is None
        assert planner.layer.can_chunk
    if planner.choose([request]) == ["gather"]:
        assert parts.calls > 0


@given(planners, prefills)
def test_a_request_that_cannot_gain_stays_stock(planner: Planner, request: tuple[int, int]) -> None:
    if not planner.may_gain(*request):
        assert planner.choose([request]) == ["paged"]


@given(planners, st.lists(st.none() | prefills, min_size=2, max_size=6))
def test_a_step_that_cannot_gain_stays_stock(planner: Planner, step: list[Request]) -> None:
    alone = [request for request in step if request is not None]
    if alone and not planner.step_may_gain(*(np.array(numbers) for numbers in zip(*alone, strict=True))):
        assert set(planner.choose(step)) == {"paged"}


@given(planners, prefills, st.integers(0, 5000), st.integers(0, 50_000))
def test_more_tokens_never_cost_less(planner: Planner, request: tuple[int, int], query: int, context: int) -> None:
    layer = dataclasses.replace(planner.layer, must_gather=False)
    planner = dataclasses.replace(planner, layer=layer)
    few, queries = planner.costs_us(*request), planner.costs_us(request[0] + query, request[1])
    assert few["paged"] > 0
    assert all(queries[way] >= few[way] for way in ("paged", "fresh") if way in few and way in queries)
    if request[1]:
        assert planner.costs_us(request[0], request[1] + context)["paged"] >= few["paged"]
    if layer.num_kv_heads == 1 or layer.window is not None:  # else it is cut another way, where that fits better
        counts = [planner.parts(*request).calls, planner.parts(request[0] + query, request[1]).calls]
        assert counts[0] <= counts[1] or counts[1] == 0


@given(planners, steps)
def test_a_workspace_for_all_is_never_dearer(planner: Planner, step: list[Request]) -> None:
    ample = dataclasses.replace(planner, workspace_bytes=1 << 50)
    for request in step:
        if request is not None:
            costs, least = planner.costs_us(*request), ample.costs_us(*request)
            assert ample.parts(*request) == (1, "whole")
            assert all(least[way] <= cost for way, cost in costs.items())
            assert all(cost >= planner.attention_us(*request) * 0.9 for cost in costs.values())


@given(layers, prefills, st.integers(0, 40))
def test_what_just_fits_is_gathered_at_once(layer: Layer, request: tuple[int, int], spare: int) -> None:
    need = layer.keys(*request) * layer.row_bytes
    assert make(layer, workspace=need + spare).parts(*request) == (1, "whole")
    without = make(layer, workspace=need - 1).parts(*request)
    assert without == (0, "whole") or without.of != "whole"


def test_a_gather_of_all_but_the_step_s_own_tokens_is_merged_and_costs_that() -> None:
    layer, request = Layer(4, 4, 128, 16), (2048, 300_000)
    fits, not_quite = (make(layer, workspace=tokens * layer.row_bytes) for tokens in (302_048, 302_047))
    assert fits.parts(*request) == (1, "whole")
    assert not_quite.parts(*request) == (1, "keys")
    merged = H200.call_us + 3 * fits.partial_bytes(2048) / (H200.gather_tbps * 1e6)
    assert not_quite.costs_us(*request)["gather"] - fits.costs_us(*request)["gather"] >= merged
    hosts = [planner.host_us([request], ["gather"]) for planner in (fits, not_quite)]
    assert hosts == pytest.approx([H200.gather_host_us, H200.gather_host_us + H200.fresh_host_us])


@given(planners, prefills)
def test_parts_hold_every_key(planner: Planner, request: tuple[int, int]) -> None:
    query, context = request
    layer, room, chunks = planner.layer, planner.chunk_tokens(query), planner._chunks(query, context)
    assert room * layer.row_bytes + planner.partial_bytes(query) <= planner.workspace_bytes or room == 0
    assert room % layer.page_size == 0 or room < layer.page_size
    if chunks:
        covered = chunks * room
        keys = context if layer.can_fresh else context + query
        assert covered - room < keys <= covered


HOST_BOUND = dataclasses.replace(H200, paged_host_us=80.0, fresh_host_us=80.0, gather_host_us=95.0)


@pytest.mark.parametrize(
    ("requests", "ways"),
    [
        ([(256, 30_000)], ["paged"]),
        ([(16, 0)], ["paged"]),
        ([(2048, 120_000)], ["gather"]),
        ([None, (2048, 30_000)], ["paged", "gather"]),
    ],
)
def test_a_step_that_waits_for_the_host_is_left_alone(requests: list[Request], ways: list[str]) -> None:
    planner = make(dataclasses.replace(GQA, num_kv_heads=4), calibration=HOST_BOUND)
    assert planner.choose(requests) == ways


@given(layers, st.integers(1, 300), st.integers(0, 300))
def test_pairs_are_counted(layer: Layer, query: int, context: int) -> None:
    window = 10**9 if layer.window is None else layer.window
    assert layer.pairs(query, context) == sum(min(context + i, window) + 1 for i in range(query))


@given(steps, st.sampled_from(["auto", "always", "never"]))
def test_decodes_are_never_gathered(step: list[Request], mode: str) -> None:
    ways = make(mode=mode).choose([None, *step, None])
    assert ways[0] == ways[-1] == "paged"


@given(layers, steps)
def test_never_is_never(layer: Layer, step: list[Request]) -> None:
    planner = make(layer, "never")
    assert planner.idle
    assert planner.choose(step) == ["paged"] * len(step)


@given(layers, steps, st.sampled_from([None, H200]))
def test_always_takes_what_can_be(layer: Layer, step: list[Request], calibration: Any) -> None:
    planner = make(layer, "always", calibration)
    for request, way in zip(step, planner.choose(step), strict=True):
        if request is not None:
            fresh = request[1] == 0 and layer.can_fresh
            assert (way == "paged") == (not fresh and planner.parts(*request).calls == 0)


def test_unmeasured_gpus_and_layers_stay_stock() -> None:
    assert planning.for_gpu("NVIDIA A100") is None
    assert make(calibration=None).idle
    assert make(dataclasses.replace(GQA, head_size=96)).idle
    assert make(dataclasses.replace(GQA, fp8=True)).idle
    assert make(dataclasses.replace(GQA, head_size=256, page_size=80)).idle


def test_e5m2_is_always_gathered() -> None:
    planner = make(dataclasses.replace(GQA, must_gather=True, fp8=True), "never", None)
    assert planner.choose([(1, 5000), (2048, 200_000)]) == ["gather", "gather"]
    assert planner.choose([(16_000, 0)]) == ["fresh"]
    assert planner.choose([(1, 5000), (300, 0)]) == ["gather", "gather"]  # one call
    with pytest.raises(RuntimeError, match=r"\(8192, 30000\) does not fit the gather workspace; raise kda_plugin"):
        make(planner.layer, workspace=16 * MIB).choose([(8192, 30_000)])


# What was measured on an H200, and the ways that were faster there; 64/8 heads and 16 queries by analogy.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "page", "query", "context", "way"),
    [
        (32, 8, 128, 16, 8192, 0, "fresh"),
        (32, 8, 128, 128, 8192, 0, "fresh"),
        (16, 4, 256, 16, 8192, 0, "fresh"),
        (32, 8, 128, 16, 2048, 30_000, "gather"),
        (32, 8, 128, 16, 8192, 120_000, "gather"),
        (32, 8, 128, 528, 2048, 120_000, "gather"),
        (32, 8, 128, 16, 256, 120_000, "paged"),
        (32, 8, 128, 528, 256, 120_000, "paged"),
        (32, 8, 128, 128, 8192, 120_000, "paged"),
        (32, 8, 128, 128, 256, 120_000, "paged"),
        (8, 1, 128, 16, 2048, 120_000, "gather"),
        (64, 8, 128, 16, 2048, 30_000, "gather"),
        (16, 16, 128, 16, 2048, 30_000, "paged"),
        (16, 16, 128, 16, 2048, 120_000, "paged"),
        (16, 16, 128, 16, 8192, 120_000, "gather"),
        (16, 16, 128, 16, 8192, 30_000, "gather"),
        (16, 16, 128, 16, 256, 120_000, "paged"),
        (32, 8, 64, 16, 2048, 120_000, "gather"),
        (16, 4, 256, 16, 8192, 120_000, "gather"),
        (16, 4, 256, 16, 256, 120_000, "paged"),
        (32, 8, 128, 16, 16, 30_000, "paged"),
    ],
)
def test_defaults_agree_with_what_was_measured(
    heads: int, kv_heads: int, head_size: int, page: int, query: int, context: int, way: str
) -> None:
    assert make(Layer(heads, kv_heads, head_size, page)).choose([(query, context)]) == [way]


def test_a_small_prefill_amid_decodes_is_not_worth_a_call() -> None:
    planner = make()
    assert planner.choose([(64, 0)]) == ["fresh"]
    assert planner.choose([None, (64, 0)]) == ["paged", "paged"]
    assert planner.choose([None, (8192, 0)]) == ["paged", "fresh"]


# ---- The file -------------------------------------------------------------------------------------------------------


def test_a_calibration_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    H200.save(file)
    assert planning.load(file) == H200
    assert planning.for_gpu("NVIDIA H200", str(file)) == H200
    with pytest.raises(ValueError, match="was measured on NVIDIA H200, this is NVIDIA H100: run vllm-kda bench"):
        planning.for_gpu("NVIDIA H100", str(file))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, '"format" must be 1'),
        ({"gather_tbps": 0}, '"gather_tbps" is 0, must be a number above 0'),
        ({"call_us": "1"}, "\"call_us\" is '1', must be a number above 0"),
        ({"gpu": None}, '"gpu" is None, must be a string'),
        ({"more": 1}, "unexpected keyword argument 'more'"),
        ({"rates": [{"head_size": 128}]}, "missing 6 required"),
        ({"rates": [{**dataclasses.asdict(H200.rates[0]), "page": 16}]}, '"page" is 16, must be tile or other'),
        ({"rates": [{**dataclasses.asdict(H200.rates[0]), "paged_penalty": -1}]}, "must be a number above -1"),
    ],
)
def test_a_wrong_calibration_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    H200.save(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=r"is no calibration of this version, write it anew with vllm-kda") as error:
        planning.load(file)
    assert said in str(error.value)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no calibration can be read from"):
        planning.load(tmp_path / "missing.json")
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(ValueError, match="no calibration can be read from"):
        planning.load(tmp_path / "empty.json")


def test_groups_between_the_measured_ones_take_the_smaller() -> None:
    rate = H200.rate(dataclasses.replace(GQA, num_heads=48))
    assert rate is not None
    assert rate.group == 4
