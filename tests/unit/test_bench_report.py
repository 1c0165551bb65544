"""`vllm-kda bench report` with a benchmark of our own in place of the real ones: no engine, no torch."""

from __future__ import annotations

import base64
import contextlib
import html.parser
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_kda_plugin import cli, machine
from vllm_kda_plugin.bench import report, report_page
from vllm_kda_plugin.bench.compare import KINDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
FACTS = machine.Facts(versions={"torch": "2.13.0+cpu", "vllm": "0.32.0+cpu"})
OVERHEAD = {"provider": "torch", "tokens": 1, "before_ms": 2.0, "after_ms": 1.0, "speedup": 2.0}
HEADER: dict[str, Any] = {"machine": {"device": "CPU"}, "versions": {}}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
# Writes JSON and plot as the real one does; the file "say" in its folder tells it to do otherwise.
FAKE = f"""
import base64, json, pathlib, subprocess, sys, time
options = dict(zip(sys.argv, sys.argv[1:]))
file = pathlib.Path(options["--json"])
(folder := file.parent.parent).joinpath("calls").open("a").write(file.stem + "\\n")
say = json.loads((folder / "say").read_text()).get(file.stem.removeprefix("partial-"), "")
file.write_text(json.dumps({{**{HEADER!r}, "cases": [{OVERHEAD!r}]}}))
if say == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "pids").write_text(f"{{child.pid}}")
    time.sleep(60)
if say == "break":
    file.write_text("{{")
elif say:
    print("out of <memory> & more")
    sys.exit(1)
pathlib.Path(options["--plot"]).write_bytes({PNG!r})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fake.py").write_text(FAKE)
    tell(tmp_path)
    monkeypatch.setattr(report, "BENCH", [sys.executable, str(tmp_path / "fake.py")])
    monkeypatch.setattr(machine, "collect", lambda: FACTS)
    return tmp_path / "r"


def tell(root: Path, **say: str) -> None:
    (root / "say").write_text(json.dumps(say))


def calls(root: Path) -> list[str]:
    file = root / "calls"
    found = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return [name.removeprefix("partial-") for name in found]


def states(folder: Path) -> dict[str, str]:
    return {name: row["state"] for name, row in json.loads((folder / "report.json").read_text())["parts"].items()}


def test_parts_are_those_of_the_command_line() -> None:
    assert tuple(part.name for part in report.PARTS) == cli.REPORT_PARTS == KINDS


def test_everything_that_can_run_does_and_what_is_complete_is_skipped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "report", str(folder), "--only", "gather"]) == 0
    assert calls(folder.parent) == ["gather"]
    assert states(folder)["kda"] == "not asked for"
    assert cli.main(["bench", "report", str(folder)]) == 0
    assert calls(folder.parent) == ["kda", "kda-overhead", "serve"]
    said = capsys.readouterr().out
    assert "gather: complete, taken as it is" in said
    assert "attention: cannot run here: it needs an NVIDIA GPU" in said
    assert states(folder) == dict.fromkeys(KINDS, "done") | {"attention": "cannot run"}
    (folder / "kda.json").write_text('{"cut')
    (folder / "serve.json").unlink()
    assert cli.main(["bench", "report", str(folder)]) == 0
    assert calls(folder.parent) == ["kda", "serve"]
    row = json.loads((folder / "report.json").read_text())["parts"]["kda-overhead"]
    assert row["command"] == "vllm-kda bench kda --overhead --json kda-overhead.json --plot kda-overhead.png"
    assert not list(folder.glob("partial-*"))


@pytest.mark.parametrize(
    ("say", "reason"), [("fail", "exit code 1: out of <memory> & more"), ("break", "no whole JSON")]
)
def test_a_part_that_fails_is_named_and_the_rest_goes_on(
    say: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(folder.parent, kda=say)
    assert report.run(folder, None) == 1
    assert "Failed: kda. Try these again with: vllm-kda bench report" in capsys.readouterr().err
    assert calls(folder.parent) == ["gather", "kda", "kda-overhead", "serve"]
    assert reason in json.loads((folder / "report.json").read_text())["parts"]["kda"]["reason"]
    assert not (folder / "kda.json").exists()
    page = (folder / "report.html").read_text()
    assert "Failed" in page
    assert "<memory>" not in page
    assert ("out of &lt;memory&gt; &amp; more" in page) == (say == "fail")
    tell(folder.parent)
    assert report.run(folder, None) == 0
    assert calls(folder.parent) == ["kda"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_part_and_says_how_to_go_on(number: int, code: int, folder: Path) -> None:
    root = folder.parent
    tell(root, kda="hang")
    program = (
        "import sys; from vllm_kda_plugin import machine; from vllm_kda_plugin.bench import report\n"
        f"machine.collect = lambda: machine.Facts(versions={FACTS.versions!r})\n"
        f"report.BENCH = {report.BENCH!r}\n"
        f"sys.exit(report.run(report.Path({str(folder)!r}), None))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: (root / "pids").exists() and (root / "pids").read_text().isdigit())
        assert report.run(folder, None) == 2  # one at a time
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
    assert process.returncode == code
    assert f"Go on with: vllm-kda bench report {folder}" in error
    wait_for(lambda: not alive(int((root / "pids").read_text())))
    assert states(folder)["gather"] == "done"
    assert states(folder)["kda"] == "interrupted"
    assert states(folder)["serve"] == "not run yet"
    assert "Interrupted" in (folder / "report.html").read_text()
    calls(root)
    tell(root)
    assert report.run(folder, None) == 0
    assert calls(root) == ["kda", "kda-overhead", "serve"]


def wait_for(true: Any) -> None:
    end = time.monotonic() + 15
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_other_folders_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    (folder / "gather.json").write_text("mine")
    assert report.run(folder, None) == 2
    assert "is not empty and holds no report" in capsys.readouterr().err
    assert (folder / "gather.json").read_text() == "mine"
    for text in ("{", "[]", '{"parts": {"kda": {}}}'):
        (folder / "report.json").write_text(text)
        assert report.run(folder, None) == 2
        assert "is not what vllm-kda bench report writes" in capsys.readouterr().err
    file = folder / "gather.json"
    assert report.run(file, None) == 2
    assert "cannot be used" in capsys.readouterr().err
    other = folder.parent / "other"
    assert report.run(other, ["gather"]) == 0
    monkeypatch.setattr(machine, "collect", lambda: machine.Facts(versions={"torch": "3"}))
    assert report.run(other, None) == 2
    assert "torch 2.13.0+cpu there, 3 here; vllm 0.32.0+cpu there, None here" in capsys.readouterr().err


def test_what_cannot_run_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "collect", lambda: machine.Facts())
    assert report.run(folder, None) == 1
    assert "torch is not installed" in (folder / "report.html").read_text()
    on_gpu = machine.Facts(versions={"torch": "2"}, torch_cuda="13.0", gpus=["a GPU, 1"])
    reasons = [part.why_not(on_gpu) for part in report.PARTS]
    assert reasons == [None, "vLLM is not installed", None, "vLLM is not installed", "vLLM is not installed"]
    assert report.has_gpu(on_gpu)
    on_gpu.engine = {"cuda_available": False}  # CUDA_VISIBLE_DEVICES=
    assert not report.has_gpu(on_gpu)


def test_secrets_stay_out() -> None:
    variables = {"VLLM_API_KEY": "secret", "VLLM_KDA_GATHER": "never", "VLLM_PLUGINS": "x"}
    here = report.describe(machine.Facts(variables=variables))
    assert here["variables"] == {"VLLM_KDA_GATHER": "never", "VLLM_PLUGINS": "x"}
    assert "secret" not in json.dumps(here)


def test_time_left_follows_what_it_took() -> None:
    estimate = report.Estimate({"a": 10, "b": 20, "c": 30})
    assert estimate.left("a", 4) == "about 56 s left"
    assert estimate.left("a", 15) == "over 50 s left"
    assert estimate.completed("a", 15) == 10
    estimate.finish("a", 40)
    assert estimate.left("b", 20) == "about 3 min left"
    assert estimate.completed("b", 20) == 15
    assert estimate.total == 60


class Links(html.parser.HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


def full(folder: Path) -> Path:
    """A folder with the figures in docs/, and with odd words in the record."""
    folder.mkdir(exist_ok=True)
    odd = {"state": "failed", "seconds": 1.0, "reason": "<script>alert('x')</script>", "tail": ['<b> & "c"']}
    done = {"state": "done", "seconds": 61.2, "began": "2026-01-01T00:00:00+00:00", "command": "vllm-kda bench"}
    parts: dict[str, Any] = dict.fromkeys(KINDS, done) | {"kda": odd}
    for name in ("gather", "attention-h200", "serve-h200"):
        shutil.copy(DOCS / f"{name}.json", folder / f"{name.removesuffix('-h200')}.json")
        (folder / f"{name.removesuffix('-h200')}.png").write_bytes(PNG)
    (folder / "kda-overhead.json").write_text(json.dumps({**HEADER, "cases": [OVERHEAD]}))
    providers = {"native": {"us": 9.0, "error_out": 0.001, "error_state": 0.0}}
    kda = {"gate": "bounded", "decay": "<i>", "heads": 4, "sequences": "1x512", "floor_us": 1.0, "providers": providers}
    kda_report = {**HEADER, "left_out": {"triton": "no <GPU>"}, "cases": [kda, {**kda, "wrong": ["native"]}]}
    (folder / "partial-kda.json").write_text(json.dumps(kda_report))
    record = {**report.describe(FACTS), "machine": {"processor": "a <CPU>"}, "parts": parts}
    report_page.write(folder, record)
    return folder / "report.html"


def test_page_is_one_file_and_escaped(tmp_path: Path) -> None:
    page = full(tmp_path).read_text()
    links = Links()
    links.feed(page)
    assert not [link for link in links.found if not link.startswith(("#", "data:"))]
    assert not {"script", "iframe", "object", "embed", "base", "form"} & set(links.tags)
    assert links.tags.count("img") == 3
    for word in ("http:", "https:", "url(", "@import", "<i>", "<CPU>", "<GPU>", "<script", "is not as bench"):
        assert word not in page, word
    for word in ("&lt;script&gt;", "a &lt;CPU&gt;", "no &lt;GPU&gt;", "WRONG", "All cases, 600 rows", "301.0 ms"):
        assert word in page, word


def test_page_says_what_it_cannot_read(tmp_path: Path) -> None:
    assert "not what vllm-kda bench writes" in report_page.tables({})[0][0]
    assert "is not as bench serve writes it" in report_page.tables({**HEADER, "first_token": 1})[0][0]
    row = {"state": "done"}
    page = report_page.render(tmp_path, {**report.describe(FACTS), "parts": {"gather": row}})
    assert "Its JSON cannot be read" in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_page_opens_in_a_browser(tmp_path: Path) -> None:
    page = full(tmp_path / "r")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        ["chromium", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    links = Links()
    links.feed(done.stdout)
    assert links.tags.count("h2") == 1 + len(KINDS)
    assert links.tags.count("tr") > 600
