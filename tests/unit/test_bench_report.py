"""Reports: every benchmark in a process of its own, taken up again where it was interrupted, and one page."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_kda_plugin.bench import report, report_page

OVERHEAD = {
    "machine": {"gpu": "none"},
    "versions": {},
    "cases": [{"provider": "<torch>", "tokens": 1, "before_ms": 2.0, "after_ms": 1.0, "speedup": 2.0}],
}
FAKE = """
import json, pathlib, sys, time
arguments = sys.argv[1:]
file = pathlib.Path(arguments[arguments.index("--json") + 1])
here = pathlib.Path({here!r})
with (here / "runs").open("a") as runs:
    runs.write(arguments[0] + "\\n")
if (here / ("fail-" + arguments[0])).exists():
    sys.exit("no luck with <" + arguments[0] + ">")
file.write_text({text!r})
if (here / ("hang-" + arguments[0])).exists():
    time.sleep(60)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Benchmarks that write the same JSON at once; files in the returned folder make them fail or hang."""
    here = tmp_path / "fake"
    here.mkdir()
    script = here / "bench.py"
    script.write_text(FAKE.format(here=str(here), text=json.dumps(OVERHEAD)))
    monkeypatch.setattr(report, "BENCH", [sys.executable, str(script)])
    return here


def runs(fake: Path) -> list[str]:
    return (fake / "runs").read_text().split()


def page(folder: Path) -> str:
    return (folder / report_page.PAGE).read_text(encoding="utf-8")


def test_what_is_complete_is_not_run_again(fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "report"
    assert report.run(folder, ["gather", "kda"]) == 0
    assert runs(fake) == ["gather", "kda"]
    assert report.run(folder, ["gather", "kda"]) == 0
    assert "gather: complete, taken as it is" in capsys.readouterr().out
    (folder / "kda.json").write_text('{"cut off')
    assert report.run(folder, ["gather", "kda"]) == 0
    assert runs(fake) == ["gather", "kda", "kda"]
    assert not list(folder.glob("partial-*"))


def test_a_part_that_fails_is_named_and_the_page_is_written(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    (fake / "fail-gather").touch()
    assert report.run(folder, ["gather", "kda"]) == 1
    told = capsys.readouterr()
    assert "Failed: gather." in told.err
    assert "no luck with &lt;gather&gt;" in page(folder)
    (fake / "fail-gather").unlink()
    assert report.run(folder, ["gather", "kda"]) == 0
    assert runs(fake) == ["gather", "kda", "gather"]


def test_the_page_needs_no_other_file_and_escapes_what_it_is_told(fake: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    report.run(folder, ["gather", "kda"])
    text = page(folder)
    assert "&lt;torch&gt;" in text
    assert "<torch>" not in text
    assert "http://" not in text
    assert "https://" not in text
    assert "<script" not in text
    assert "vllm-kda bench gather --json gather.json" in text


def test_an_interrupted_report_says_how_to_go_on(fake: Path, tmp_path: Path) -> None:
    """By a signal, in a process of its own: its child must be gone too."""
    folder = tmp_path / "report"
    (fake / "hang-kda").touch()
    code = (
        "import sys, pathlib; from vllm_kda_plugin.bench import report; "
        f"report.BENCH = [sys.executable, {str(fake / 'bench.py')!r}]; "
        f"sys.exit(report.run(pathlib.Path({str(folder)!r}), ['gather', 'kda']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "partial-kda.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"Go on with: vllm-kda bench report {folder} --only gather kda" in told
    states = {name: row["state"] for name, row in json.loads((folder / report.RECORD).read_text())["parts"].items()}
    assert (states["gather"], states["kda"]) == ("done", "interrupted")
    assert "Interrupted" in page(folder)


def test_a_folder_of_something_else_is_refused(fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert report.run(tmp_path / "full", None) == 2
    assert "holds no report" in capsys.readouterr().err


def test_figures_of_another_machine_are_not_mixed(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    report.run(folder, ["gather"])
    found: dict[str, Any] = json.loads((folder / report.RECORD).read_text())
    found["versions"]["torch"] = "1.0"
    (folder / report.RECORD).write_text(json.dumps(found))
    assert report.run(folder, ["gather"]) == 2
    assert "torch 1.0 there" in capsys.readouterr().err


def test_what_needs_a_gpu_is_listed_with_the_reason() -> None:
    facts = report.machine.collect()
    if report.has_gpu(facts):
        pytest.skip("there is a GPU here")
    attention = next(part for part in report.PARTS if part.name == "attention")
    assert "needs" in (attention.why_not(facts) or "")


def test_time_left_follows_how_long_parts_took() -> None:
    estimate = report.Estimate({"a": 10.0, "b": 30.0})
    assert estimate.left("a", 4.0) == "about 36 s left"
    estimate.finish("a", 20.0)
    assert estimate.left("b", 0.0) == "about 60 s left"
    assert estimate.left("b", 90.0).startswith("over")
    assert estimate.completed("b", 1000.0) == estimate.total
