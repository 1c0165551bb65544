"""`vllm-kda bench compare`: what it finds, refuses and warns of."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kda_plugin import cli
from vllm_kda_plugin.bench import compare
from vllm_kda_plugin.bench.compare import Figure, Figures

DOCS = Path(__file__).resolve().parents[2] / "docs"
GATHER, SERVE, EAGER = (DOCS / f"{name}.json" for name in ("gather", "serve-h200", "serve-h200-eager"))
HEADER: dict[str, Any] = {"machine": {"device": "a GPU"}, "versions": {}}
VALUES = st.floats(1e-3, 1e6)
FIGURES = st.dictionaries(
    st.sampled_from("abcdefgh"),
    VALUES,
).map(lambda found: {name: Figure(value, "us", more_is_faster=name in "abc") for name, value in found.items()})


@given(FIGURES, FIGURES, st.floats(0, 50))
def test_every_figure_is_told_once_and_both_ways_round(one: Figures, other: Figures, percent: float) -> None:
    forth, back = compare.compare(one, other), compare.compare(other, one)
    slower, faster = forth.beyond(percent)
    slower_back, faster_back = back.beyond(percent)
    assert [change.name for change in forth.changes] == sorted(
        [change.name for change in forth.changes], key=lambda name: -compare.Change(name, one[name], other[name]).ratio
    )
    assert {change.name for change in slower} == {change.name for change in faster_back}
    assert {change.name for change in faster} == {change.name for change in slower_back}
    assert not {change.name for change in slower} & {change.name for change in faster}
    assert forth.only == back.only[::-1]
    assert {change.name for change in forth.changes} | set(forth.only[0]) | set(forth.only[1]) == {*one, *other}
    if forth.mean is None or back.mean is None:
        assert not forth.changes
        assert not back.changes
    else:
        assert math.isclose(forth.mean * back.mean, 1, rel_tol=1e-9)
        assert min(c.ratio for c in forth.changes) * 0.999 <= forth.mean <= max(c.ratio for c in forth.changes) * 1.001


@given(FIGURES)
def test_nothing_changes_against_itself(one: Figures) -> None:
    found = compare.compare(one, one)
    assert found.beyond(0) == ([], [])
    assert found.only == ([], [])
    assert found.mean in (None, pytest.approx(1))


@given(VALUES, st.floats(1.001, 10), st.booleans())
def test_slower_is_less_speed_or_more_time(value: float, factor: float, more_is_faster: bool) -> None:
    before = Figure(value, "", more_is_faster)
    after = Figure(value / factor if more_is_faster else value * factor, "", more_is_faster)
    change = compare.Change("x", before, after)
    assert change.ratio == pytest.approx(factor)
    assert change.percent == pytest.approx((factor - 1) * 100)


def write(file: Path, report: dict[str, Any]) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(report))
    return file


def scaled(report: dict[str, Any], factor: float) -> dict[str, Any]:
    report = copy.deepcopy(report)
    report["cases"][0]["hot_us"] *= factor
    return report


@pytest.mark.parametrize(
    ("factor", "options", "code", "said"),
    [
        (1.0, [], 0, "0 slower and 0 faster by more than 3 %"),
        (1.05, [], 0, "1 slower and 0 faster by more than 3 %"),
        (0.95, [], 0, "0 slower and 1 faster by more than 3 %"),
        (1.05, ["--threshold", "6"], 0, "0 slower and 0 faster by more than 6 %"),
        (1.05, ["--fail-above", "4"], 1, "+5.0 %"),
        (1.05, ["--fail-above", "6"], 0, "+5.0 %"),
        (0.5, ["--fail-above", "0"], 0, "-50.0 %"),
    ],
)
def test_files(
    factor: float, options: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "x.json", scaled(json.loads(GATHER.read_text()), factor))
    assert cli.main(["bench", "compare", str(GATHER), str(other), *options]) == code
    out, error = capsys.readouterr()
    assert said in out
    assert "98 figures in both" in out
    expected = "Slower by more than 4 %: gather, NHD, random slots, page 8, 64 tokens, hot\n" if code else ""
    assert error == expected


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gather = json.loads(GATHER.read_text())
    before, after = tmp_path / "a", tmp_path / "b"
    write(before / "gather.json", gather)
    write(before / "serve.json", json.loads(SERVE.read_text()))
    write(after / "serve.json", json.loads(EAGER.read_text()))
    changed = scaled(gather, 2)
    del changed["cases"][1]
    changed["machine"]["device"] = "another"
    write(after / "gather.json", changed)
    overhead = {"provider": "native", "tokens": 1, "after_ms": 1.0, "host_us": {"after": 2.0}}
    write(after / "kda-overhead.json", {**HEADER, "cases": [overhead]})
    assert compare.run(before, after, 3, None) == 0
    out, error = capsys.readouterr()
    assert "gather, in the first only: classic, random slots" in out
    assert f"kda-overhead is in {after} only" in out
    assert "CUSTOM, decode" in out
    assert "Warning: the machines differ: device NVIDIA H200 and another\n" in error
    assert "Warning: serve, settings differs: enforce_eager False and True\n" in error


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, some = tmp_path / "empty", tmp_path / "some"
    empty.mkdir()
    write(some / "gather.json", json.loads(GATHER.read_text()))
    other = write(tmp_path / "other" / "serve.json", json.loads(SERVE.read_text())).parent
    odd = write(tmp_path / "odd" / "serve.json", json.loads(GATHER.read_text())).parent
    bare = write(tmp_path / "bare.json", {**HEADER, "host_us": None, "cases": []})
    broken = write(tmp_path / "broken.json", {**HEADER, "host_us": None, "cases": [{"hot_us": 1}]})
    nan = write(tmp_path / "nan.json", scaled(json.loads(GATHER.read_text()), math.nan))
    text = tmp_path / "x.json"
    text.write_text("[1]")
    for one, two, said in (
        (GATHER, SERVE, "compare two of one kind"),
        (GATHER, some, "compare two folders or two files"),
        (some, empty, "holds no finished part of a report"),
        (some, other, "none is in both"),
        (other, odd, "is of bench gather"),
        (GATHER, tmp_path / "none", "does not exist"),
        (GATHER, text, "is not what vllm-kda bench writes"),
        (GATHER, DOCS / "gather.png", "cannot be read"),
        (DOCS / "calibration-h200.json", GATHER, "is none of gather, attention"),
        (GATHER, bare, "no figure in common"),
        (GATHER, broken, "is not as vllm-kda bench writes it"),
        (GATHER, nan, "is no positive number"),
    ):
        assert compare.run(one, two, 3, 1) == 2, said
        assert said in capsys.readouterr().err


def test_wrong_and_skipped_figures_do_not_count() -> None:
    place = {"gate": "bounded", "decay": "fast", "heads": 4, "sequences": "1x512"}
    rows = [{**place, "providers": {"native": {"us": 1.0}, "triton": {"us": 2.0}}, "wrong": ["native"]}]
    rows.append({**place, "skipped": "does not fit"})
    report = {**HEADER, "left_out": {}, "cases": rows, "interrupted": True}
    assert compare.kind_of(report) == "kda"
    assert list(compare.figures("kda", report)) == ["triton, bounded gate, fast decay, 4 heads, 1x512"]
    assert list(compare.differences("kda", report, HEADER)) == ["kda was interrupted in the first"]


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "much"])
def test_percents_are_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "compare", "a", "b", f"--fail-above={text}"])
    assert f"is '{text}', must be a number from 0" in capsys.readouterr().err
