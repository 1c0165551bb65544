"""`vllm-kda bench serve` as a user runs it, with two engines on the CPU."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.support.engine import IMPLEMENTATION

COMMAND = [sys.executable, "-m", "vllm_kda_plugin.cli", "bench", "serve"]


def bench(*options: str, tmp_path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.run(
        [*COMMAND, *options], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.engine
def test_bench_serve(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "serve.json"
    sizes = ["--prompt-tokens", "40", "96", "--chunk", "32"]
    done = bench(*sizes, "--json", str(file), "--plot", str(tmp_path / "serve.svg"), tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    ours, stock = report["engines"]
    assert ours["classes"] == [IMPLEMENTATION]
    assert ours["stats"]["gathers"] > 0
    assert stock["classes"] == ["vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"]
    assert stock["stats"]["forwards"] == 0
    assert [row["prompt_tokens"] for row in report["first_token"]] == [40, 96]
    for row in report["first_token"]:
        assert all(0 < seconds < 60 for samples in row["samples_s"] for seconds in samples)
    assert all(speed > 0 for speed in report["decode"]["median_tokens_per_s"])
    for found in report["tokens"].values():
        assert found["distinct"] > 3
        assert found["differ_at"] == []
    assert "first token of a prompt of 96" in done.stdout
    assert (tmp_path / "serve.svg").stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.glob("vllm-kda-*")) == []


@pytest.mark.engine
def test_bench_serve_says_why_it_did_not_start(tmp_path: pathlib.Path) -> None:
    done = bench("--model", str(tmp_path / "no-such-model"), "--prompt-tokens", "40", tmp_path=tmp_path)
    assert done.returncode == 1
    assert "vLLM did not start with CUSTOM" in done.stderr
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr
