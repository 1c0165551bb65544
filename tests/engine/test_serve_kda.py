"""`vllm serve` over HTTP of a model of KDA and attention layers: the tokens of a full recomputation."""

from __future__ import annotations

import os
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support import kda_model
from tests.support.engine import prompts
from vllm_kda_plugin.serving import Server

pytestmark = pytest.mark.engine

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_TOKENS = 24
TIE = 1e-4  # see test_kda.py


@pytest.fixture
def model_is_known(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of vLLM that starts now knows the tests' own model, by a plugin of its own."""
    plugin = tmp_path / "plugin" / "kda_test_model-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kda-test-model\nVersion: 1\n")
    entry = "[vllm.general_plugins]\nkda_test_model = tests.support.kda_model:register\n"
    (plugin / "entry_points.txt").write_text(entry)
    paths = [str(plugin.parent), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_tokens_of_a_full_recomputation(tmp_path: pathlib.Path, model_is_known: None) -> None:
    model = kda_model.write(tmp_path / "model", "kaka", lower_bound=-5.0)
    args = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--attention-backend", "CUSTOM"]
    args += ["--kv-cache-memory-bytes", str(64 << 20), "--max-num-batched-tokens", "64", "--max-num-seqs", "8"]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = Server(model, tmp_path / "server.log", args, env=env, timeout_s=300)
    with server, httpx.Client(trust_env=False, timeout=300) as http:

        def complete(prompt: str) -> dict[str, Any]:
            body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
            answer = http.post(
                f"{server.base_url}/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
            )
            answer.raise_for_status()
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        with ThreadPoolExecutor(8) as clients:
            choices = list(clients.map(complete, [*prompts(7, 60), *prompts(1, 200, shortest=200)]))
    log = server.log_text()
    assert "KDA prefill of KimiGatedDeltaNetAttention runs on torch." in log
    assert "Using CUSTOM attention backend (vllm_kda_plugin." in log
    assert sum(len(set(choice["token_ids"])) >= 10 for choice in choices) >= 6, "too few to prove anything"
    asked, told = ([choice[name] for choice in choices] for name in ("prompt_token_ids", "token_ids"))
    assert {len(tokens) for tokens in told} == {MAX_TOKENS}
    for behind in kda_model.behind(model, asked, told):
        assert behind.max() < TIE
        assert (behind > 0).sum() <= 1
