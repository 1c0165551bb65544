"""What happens when things go wrong around the engine: each failure is told, ends in time, and is over after it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.engine.conftest import ModelFactory
from tests.support.engine import IMPLEMENTATION, engine, implementations, prompts
from vllm_kda_plugin.attention.stats import STATS
from vllm_kda_plugin.serving import Server

pytestmark = pytest.mark.engine

STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"
BACKEND = "vllm_kda_plugin.attention.backend.GatherTorchBackend"
TEXTS = prompts(4, 200, seed=11, shortest=20)
MAX_TOKENS = 24
# For an engine that was killed, or whose server was, to be gone with all that belongs to it.
GONE_S = 60


@pytest.fixture(scope="module")
def expected(model: ModelFactory) -> list[list[int]]:
    """Tokens of TEXTS by vLLM's own backend."""
    with engine(model(), "CPU_ATTN", disable_log_stats=True) as llm:
        assert implementations(llm) == {STOCK}
        tokens = generate(llm)
    assert all(len(set(one)) >= 12 for one in tokens), "too few distinct tokens to prove anything"
    return tokens


def generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(TEXTS, sampling, use_tqdm=False)]


# --- a server that is killed ---


@contextlib.contextmanager
def serve(model: str, log: pathlib.Path, **env: str) -> Iterator[Server]:
    args = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--attention-backend", "CUSTOM"]
    args += ["--kv-cache-memory-bytes", str(64 << 20), "--max-num-batched-tokens", "128"]
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with Server(model, log, args, env=env, timeout_s=200) as server:
        yield server


def complete(server: Server, prompt: str, **more: Any) -> httpx.Response:
    options = {"model": server.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    with httpx.Client(trust_env=False, timeout=100) as client:  # loopback never goes through a proxy
        return client.post(f"{server.base_url}/v1/completions", json={**options, "return_token_ids": True, **more})


def check(server: Server, expected: list[list[int]]) -> None:
    """The server answers with the tokens of vLLM's own backend, by ours."""
    for text, tokens in zip(TEXTS, expected, strict=True):
        answer = complete(server, text)
        answer.raise_for_status()
        assert answer.json()["choices"][0]["token_ids"] == tokens
    assert f"Using CUSTOM attention backend ({BACKEND})" in server.log_text()


def killed(server: Server, pid: int) -> list[str]:
    """Kill a process of a loaded server; what its clients were told. The server must end by itself."""
    begun = threading.Barrier(len(TEXTS) + 1)

    def ask(text: str) -> str:
        begun.wait(timeout=60)
        try:
            answer = complete(server, text, max_tokens=3000)
        except httpx.TransportError as error:
            return type(error).__name__
        return f"{answer.status_code} {answer.text}"

    with ThreadPoolExecutor(len(TEXTS)) as clients:
        asked = [clients.submit(ask, text) for text in TEXTS]
        begun.wait(timeout=60)
        until("requests run", lambda: running(server) == len(TEXTS))
        os.kill(pid, signal.SIGKILL)
        told = [answer.result(timeout=GONE_S) for answer in asked]
    until("the server ends", lambda: server.exit_code is not None)
    return told


def running(server: Server) -> int:
    found = re.search(r"^vllm:num_requests_running{.*} (\S+)$", server.get("/metrics"), re.MULTILINE)
    return int(float(found[1])) if found else 0


def until(what: str, holds: Any) -> None:
    deadline = time.monotonic() + GONE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {GONE_S} s: {what}"
        time.sleep(0.05)


def engine_of(server: Server) -> int:
    """The process that runs the engine: it says so in its title."""
    (core,) = (p for p in psutil.Process(server.pid).children(recursive=True) if "EngineCore" in " ".join(p.cmdline()))
    return int(core.pid)


def test_killed_and_started_again(model: ModelFactory, expected: list[list[int]], tmp_path: pathlib.Path) -> None:
    with serve(model(), tmp_path / "1.log") as server:
        check(server, expected)
        told = killed(server, engine_of(server))
        until("its other processes end", lambda: not server.group())
    assert all(answer.startswith("500 ") and "EngineCore encountered an issue" in answer for answer in told), told
    assert "EngineDeadError" in server.log_text()

    with serve(model(), tmp_path / "2.log") as server:
        check(server, expected)
        told = killed(server, server.pid)
    assert all("Error" in answer for answer in told), told
    assert server.exit_code == -signal.SIGKILL
    # vLLM's engine goes on without its server until it is ended.
    until("no process is left", lambda: not server.group())

    # The last in a home that cannot be written.
    with serve(model(), tmp_path / "3.log", HOME="/proc/self") as server:
        check(server, expected)
    assert server.exit_code == 0, server.tail()
    (counters,) = server.stats()
    assert counters["implementation"] == IMPLEMENTATION
    assert counters["gathers"] > 0


# --- memory ---


@contextlib.contextmanager
def address_space(num_bytes: int) -> Iterator[None]:
    """A limit for this process: else a Linux that lends more memory than it has refuses nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_workspace_beyond_memory_ends_the_start(model: ModelFactory, expected: list[list[int]]) -> None:
    config = {"kda_plugin": {"gather_workspace_mib": 1 << 20}}
    told = r"no memory for a gather workspace of 1048576 MiB; lower kda_plugin.gather_workspace_mib \(now 1048576\)"
    with (
        address_space(256 << 30),
        pytest.raises(MemoryError, match=told),
        engine(model(), "CUSTOM", additional_config=config),
    ):
        pass
    # The process is as good as before: the next engine starts.
    with engine(model(), "CUSTOM", disable_log_stats=True) as llm:
        assert generate(llm) == expected


# --- several in one process ---


def test_engines_side_by_side(model: ModelFactory, expected: list[list[int]]) -> None:
    """They share a process, its registry and its workspace, and take steps by turns."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    small = {"kda_plugin": {"gather_workspace_mib": 1}}
    gathers = STATS.gathers
    with contextlib.ExitStack() as stack:
        llms = [
            stack.enter_context(engine(model(), "CUSTOM", additional_config=small, block_size=32)),
            stack.enter_context(engine(model(), "GATHER_FLASH_ATTN", max_model_len=1024, block_size=64)),
        ]
        for llm in llms:
            assert implementations(llm) == {IMPLEMENTATION}
            for number, text in enumerate(TEXTS):
                llm.llm_engine.add_request(str(number), text, sampling)
        made: list[dict[str, list[int]]] = [{}, {}]
        for _ in range(10 * MAX_TOKENS):
            for llm, tokens in zip(llms, made, strict=True):
                for output in llm.llm_engine.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
            if not any(llm.llm_engine.has_unfinished_requests() for llm in llms):
                break
    for tokens in made:
        assert [tokens[str(number)] for number in range(len(TEXTS))] == expected
    assert STATS.gathers > gathers


def test_four_loads_are_as_one_and_a_fork_has_them() -> None:
    """vLLM's CPU engine is always spawned, as every server here; on CUDA it may be forked."""
    code = """
import importlib.metadata, os, sys
import vllm.v1.attention.backends.registry as registry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm_kda_plugin.plugin import register

def state():
    platform = type(current_platform)
    wrapped = platform.get_attn_backend_cls, platform.check_and_update_config
    return dict(registry._ATTN_OVERRIDES), list(registry.AttentionBackendEnum.__members__), wrapped, list(sys.meta_path)

before = state()
register()
once = state()
for _ in range(3):
    register()
(entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="vllm_kda_plugin")
assert entry.load() is register
entry.load()()
load_general_plugins()
assert all(was != now for was, now in zip(before, once)), (before, once)
assert once == state(), (once, state())
print("as one", flush=True)
if not os.fork():
    register()
    load_general_plugins()
    print("as one in the fork" if once == state() else (once, state()), flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["as one", "as one in the fork"]
    assert "inactive" not in done.stdout + done.stderr
