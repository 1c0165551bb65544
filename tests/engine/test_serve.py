"""`vllm serve` over HTTP: our backend by both of its names against the stock one, and what clients may do to it."""

from __future__ import annotations

import json
import pathlib
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.engine.conftest import ModelFactory
from tests.support.engine import IMPLEMENTATION, prompts
from vllm_kda_plugin.serving import Server, ServerError

pytestmark = pytest.mark.engine

MAX_TOKENS = 64
MAX_MODEL_LEN = 4096
# Prompts from one token to several chunks of the 128-token budget, in full blocks of 128 and beyond.
PROMPTS = [*prompts(14, 300), *prompts(2, 600, shortest=400)]
# One for all threads: making one takes longer than a completion. Loopback never goes through a proxy.
HTTP = httpx.Client(trust_env=False, timeout=300)


def serve(model: str, log: pathlib.Path, backend: str, **env: str) -> Server:
    args = ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)]
    args += ["--kv-cache-memory-bytes", str(64 << 20), "--max-num-batched-tokens", "128"]
    args += ["--enable-prompt-tokens-details", "--attention-backend", backend]
    # The tests of the engine run it in their own process; here it must be one of its own, as users have it.
    return Server(model, log, args, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **env}, timeout_s=300)


@pytest.fixture(scope="module")
def stock(model: ModelFactory, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens for PROMPTS by vLLM without any plugin: it knows the name CUSTOM but has nothing behind it."""
    log = tmp_path_factory.mktemp("stock") / "server.log"
    with serve(model(), log, "CUSTOM", VLLM_PLUGINS="") as server:
        tokens = [complete(server, prompt)["token_ids"] for prompt in PROMPTS]
        assert "kda_plugin" not in end(server)
    assert "Cannot use AttentionBackendEnum.CUSTOM backend on CPU" in server.log_text()
    for one in tokens:
        assert len(one) == MAX_TOKENS
        assert len(set(one)) >= 20, f"too few distinct tokens to prove anything: {sorted(set(one))}"
    return tokens


@pytest.fixture(scope="module", params=["CUSTOM", "GATHER_FLASH_ATTN"])
def server(
    request: pytest.FixtureRequest,
    model: ModelFactory,
    stock: list[list[int]],  # first, so that two servers never run at a time
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    with serve(model(), tmp_path_factory.mktemp(request.param) / "server.log", request.param) as server:
        yield server


def test_same_tokens_as_stock(server: Server, stock: list[list[int]]) -> None:
    for prompt, expected in zip(PROMPTS, stock, strict=True):
        assert complete(server, prompt)["token_ids"] == expected


def test_same_tokens_from_the_prefix_cache(server: Server, stock: list[list[int]]) -> None:
    complete(server, PROMPTS[-1])
    again = complete(server, PROMPTS[-1])
    assert again["cached_tokens"] >= 384
    assert again["token_ids"] == stock[-1]


def test_streaming(server: Server, stock: list[list[int]]) -> None:
    parts = [part["choices"][0] for part in stream(server, PROMPTS[-1])]
    assert len(parts) > MAX_TOKENS // 2, "tokens arrive as they are made"
    assert [token for part in parts for token in part["token_ids"]] == stock[-1]
    assert "".join(part["text"] for part in parts) == complete(server, PROMPTS[-1])["text"]


def test_concurrent_clients(server: Server, stock: list[list[int]]) -> None:
    all_begun = threading.Barrier(len(PROMPTS))

    def tokens(prompt: str) -> list[int]:
        parts = stream(server, prompt)
        begun = next(parts)
        all_begun.wait(timeout=120)  # nobody goes on reading before all have been answered
        return [token for part in [begun, *parts] for token in part["choices"][0]["token_ids"]]

    assert len(PROMPTS) == 16
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        assert list(clients.map(tokens, PROMPTS)) == stock


def test_client_that_disconnects(server: Server, stock: list[list[int]]) -> None:
    made = metric(server, "generation_tokens_total")
    many = MAX_MODEL_LEN - len(PROMPTS[-1]) - 1
    parts = stream(server, PROMPTS[-1], max_tokens=many)
    next(parts)
    assert metric(server, "num_requests_running") == 1
    parts.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30
    while metric(server, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert metric(server, "num_requests_running") == 0
    assert metric(server, "num_requests_waiting") == 0
    assert metric(server, "generation_tokens_total") - made < many, "the rest was not generated for nobody"
    assert complete(server, PROMPTS[0])["token_ids"] == stock[0]


def test_clean_shutdown_tells_what_ran(server: Server) -> None:
    """The last test of each server: it ends it."""
    complete(server, PROMPTS[0])
    end(server)
    (counters,) = server.stats()
    assert counters["implementation"] == IMPLEMENTATION
    assert counters["gathers"] > 0
    assert counters["gathered_bytes"] > counters["gathered_tokens"] > 0


def test_unknown_backend_names_ours(model: ModelFactory, tmp_path: pathlib.Path) -> None:
    server = serve(model(), tmp_path / "server.log", "NO_SUCH_BACKEND")
    with pytest.raises(ServerError, match="before it was ready"), server:
        pass
    told = "Unknown attention backend: 'NO_SUCH_BACKEND'"
    (line,) = {line for line in server.log_text().splitlines() if told in line}
    assert "CUSTOM" in line
    assert "GATHER_FLASH_ATTN" in line


def complete(server: Server, prompt: str) -> dict[str, Any]:
    """``token_ids`` and ``text`` of a completion, and how many prompt tokens were ``cached_tokens``."""
    answer = HTTP.post(f"{server.base_url}/v1/completions", json=_body(server, prompt))
    answer.raise_for_status()
    result = answer.json()
    choice, details = result["choices"][0], result["usage"]["prompt_tokens_details"] or {}
    return {**choice, "cached_tokens": details.get("cached_tokens") or 0}


def stream(server: Server, prompt: str, **more: Any) -> Iterator[dict[str, Any]]:
    """The parts of a streamed completion as they arrive; closing the iterator closes the connection."""
    url, body = f"{server.base_url}/v1/completions", _body(server, prompt, stream=True, **more)
    with HTTP.stream("POST", url, json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def _body(server: Server, prompt: str, **more: Any) -> dict[str, Any]:
    options = {"model": server.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    return {**options, "ignore_eos": True, "return_token_ids": True, **more}


def metric(server: Server, name: str) -> float:
    """One of vLLM's own figures, by its name without ``vllm:``."""
    found = re.search(rf"^vllm:{name}{{.*}} (\S+)$", server.get("/metrics"), re.MULTILINE)
    assert found, f"/metrics has no vllm:{name}"
    return float(found[1])


def end(server: Server) -> str:
    """End the server, assert that it went in order, and return its log."""
    assert len(server.group()) > 1, "the engine runs in a process of its own"
    server.stop()
    log = server.log_text()
    assert server.exit_code == 0, server.tail()
    assert not server.was_killed
    assert not server.group()
    before, told, after = log.partition("shutdown triggered")
    assert told
    assert "Traceback" not in before
    # vLLM's API server logs an EngineDeadError when its engine is gone before it; no engine process may fail.
    assert not re.search(r"^\((?!APIServer).*Traceback", after, re.MULTILINE), after
    return log
