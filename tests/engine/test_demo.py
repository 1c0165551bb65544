"""`vllm-kda demo` as a user runs it, and the ways it must fail."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.support.engine import IMPLEMENTATION
from vllm_kda_plugin import demo
from vllm_kda_plugin.demo import Completion, DemoError, check
from vllm_kda_plugin.serving import Server

COMMAND = [sys.executable, "-m", "vllm_kda_plugin.cli", "demo"]


def environment(tmp_path: pathlib.Path, **more: str) -> dict[str, str]:
    # The tests of the engine run it in their own process; the demo's must be one of its own.
    return {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TMPDIR": str(tmp_path), **more}


@pytest.mark.engine
def test_demo(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(COMMAND, env=environment(tmp_path), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tokens = [int(count) for count in re.findall(r"(\d+) prompt tokens", done.stdout)]
    cached = [int(count) for count in re.findall(r"(\d+) of them cached", done.stdout)]
    assert len(tokens) == 3
    assert tokens[1] > 1000
    assert cached[:2] == [0, 0]
    assert cached[2] > 1000
    assert len(re.findall(r"first token after [\d.]+ ms\n +'.+'", done.stdout)) == 3, done.stdout
    assert IMPLEMENTATION in done.stdout
    assert re.search(r"gathers done\W+[1-9]", done.stdout)
    assert re.search(r"bytes gathered[^│]*\W+[1-9]", done.stdout)
    assert not list(tmp_path.glob("vllm-kda-demo-*")), "nothing is left behind"


@pytest.mark.engine
def test_demo_shows_why_the_server_did_not_start(tmp_path: pathlib.Path) -> None:
    wrong = environment(tmp_path, VLLM_KDA_NO_SUCH_SETTING="1")
    done = subprocess.run(COMMAND, env=wrong, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert "VLLM_KDA_NO_SUCH_SETTING" in done.stderr
    (log,) = tmp_path.glob("vllm-kda-demo-*/server.log")
    assert str(log) in done.stderr


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "closed terminal"])
def test_interrupted_it_ends_the_server(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    # A test run in the background of a shell, or under nohup, ignores the signal and would hand that down.
    heeded = functools.partial(signal.signal, number, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        COMMAND, env=environment(tmp_path), stdout=pipe, stderr=pipe, text=True, preexec_fn=heeded
    ) as running:
        assert running.stdout
        assert running.stderr
        for line in running.stdout:
            if line.startswith("Starting:"):
                break
        children: list[psutil.Process] = []
        while not children and running.poll() is None:
            children = psutil.Process(running.pid).children(recursive=True)
        if number == signal.SIGHUP:  # then nothing can be printed any more either
            running.stdout.close()
            running.stderr.close()
        running.send_signal(number)
        running.wait(timeout=60)
    assert running.returncode == 130
    assert children
    assert not [child for child in children if child.is_running()]
    assert not list(tmp_path.glob("vllm-kda-demo-*"))


class FakeServer(Server):
    def __init__(self, *stats: dict[str, Any]) -> None:
        super().__init__("model", pathlib.Path("no-such.log"))
        self._stats = list(stats)

    def stats(self) -> list[dict[str, Any]]:
        return self._stats

    def tail(self, lines: int = 0) -> str:
        return "the last line"


def test_the_first_token_is_timed_from_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Server] = []

    def slow_client(server: Server) -> contextlib.nullcontext[None]:
        made.append(server)
        time.sleep(0.2)
        return contextlib.nullcontext()

    usage = SimpleNamespace(prompt_tokens=3, prompt_tokens_details=None)
    part = SimpleNamespace(choices=[SimpleNamespace(text="a")], usage=usage)
    monkeypatch.setattr(demo, "_client", slow_client)
    monkeypatch.setattr(demo, "_stream", lambda client, model, prompt: iter([part]))
    answers = demo._ask(FakeServer())
    assert len(made) == 1
    assert [answer.title for answer in answers] == list(demo.PROMPTS)
    assert all(0 < answer.first_token_s < 0.1 for answer in answers)


def counters(implementation: str = IMPLEMENTATION, gathers: int = 3) -> dict[str, Any]:
    return {"pid": 1, "implementation": implementation, "gathers": gathers}


def completions(cached: int = 1024) -> list[Completion]:
    return [Completion("title", "text", 1300, cached, 0.1)]


def test_check_passes_what_the_demo_promises() -> None:
    check(completions(), FakeServer(counters()), gathers=True)
    check(completions(), FakeServer(counters(gathers=0)), gathers=False)


@pytest.mark.parametrize(
    ("cached", "stats", "message"),
    [
        (1024, [], "No engine process reported"),
        (1024, [counters(implementation="vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl")], "No engine"),
        (1024, [counters(gathers=0)], "gathered nothing"),
        (0, [counters()], "prefix cache"),
    ],
)
def test_check_fails_with_the_last_lines(cached: int, stats: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DemoError, match=f"(?s){message}.*the last line"):
        check(completions(cached), FakeServer(*stats), gathers=True)
