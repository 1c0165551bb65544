"""Two reports beside each other: the plugin's own figures, by name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kda_plugin.bench import compare
from vllm_kda_plugin.bench.compare import Figure

DOCS = pathlib.Path(__file__).parents[2] / "docs"
COMMITTED = {"gather.json": "gather", "attention-h200.json": "attention", "serve-h200.json": "serve"}


def overhead(**ms: float) -> dict[str, Any]:
    rows = [
        {"provider": name, "tokens": 64, "before_ms": 9.0, "after_ms": figure, "speedup": 9.0 / figure}
        for name, figure in ms.items()
    ]
    return {"machine": {"gpu": "A"}, "versions": {}, "cases": rows}


def written(folder: pathlib.Path, name: str, report: dict[str, Any]) -> pathlib.Path:
    file = folder / name
    file.write_text(json.dumps(report))
    return file


@pytest.mark.parametrize(("name", "kind"), COMMITTED.items())
def test_committed_figures_are_read(name: str, kind: str) -> None:
    report = compare.read(DOCS / name)
    assert compare.kind_of(report) == kind
    found = compare.figures(kind, report)
    assert found
    same = compare.compare(found, found)
    assert same.mean == pytest.approx(1.0)
    assert same.beyond(0.0) == ([], [])


def test_what_got_slower_is_told_and_fails_only_if_asked(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(tmp_path, "a.json", overhead(native=1.0, torch=1.0, triton=1.0))
    after = written(tmp_path, "b.json", overhead(native=1.2, torch=0.5, flashkda=1.0))
    assert compare.run(before, after, 3.0, None) == 0
    told = capsys.readouterr().out
    assert "+20.0 %" in told
    assert "-50.0 %" in told
    assert "in the first only: triton, 64 tokens" in told
    assert "in the second only: flashkda, 64 tokens" in told
    assert compare.run(before, after, 3.0, 25.0) == 0
    assert compare.run(before, after, 3.0, 10.0) == 1
    assert "Slower by more than 10 %: kda-overhead, native, 64 tokens" in capsys.readouterr().err


def test_another_machine_is_a_warning_and_another_benchmark_a_refusal(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written(tmp_path, "a.json", overhead(native=1.0))
    other = written(tmp_path, "b.json", overhead(native=1.0) | {"machine": {"gpu": "B"}})
    assert compare.run(one, other, 3.0, 0.0) == 0
    assert "the machines differ: gpu A and B" in capsys.readouterr().err
    assert compare.run(one, DOCS / "gather.json", 3.0, None) == 2
    assert "compare two of one kind" in capsys.readouterr().err
    assert compare.run(one, tmp_path / "none.json", 3.0, None) == 2
    assert compare.run(tmp_path, one, 3.0, None) == 2


def test_folders_are_compared_part_by_part(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ms in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        written(tmp_path / name, "kda-overhead.json", overhead(native=ms))
    (tmp_path / "b" / "gather.json").write_text((DOCS / "gather.json").read_text())
    assert compare.run(tmp_path / "a", tmp_path / "b", 3.0, 50.0) == 1
    assert f"gather is in {tmp_path / 'b'} only" in capsys.readouterr().out


@given(
    before=st.floats(1e-3, 1e6), after=st.floats(1e-3, 1e6), more_is_faster=st.booleans(), percent=st.floats(0.1, 100)
)
def test_slower_one_way_is_faster_the_other(before: float, after: float, more_is_faster: bool, percent: float) -> None:
    one, other = ({"x": Figure(value, "us", more_is_faster)} for value in (before, after))
    there, back = compare.compare(one, other), compare.compare(other, one)
    slower, faster = there.beyond(percent)
    assert (len(slower), len(faster)) == tuple(len(changes) for changes in reversed(back.beyond(percent)))
    assert not (slower and faster)
    if slower:
        assert (before > after) is more_is_faster
