"""KDA layers in the real engine on CUDA: the tokens of stock vLLM, apart from ties, which are listed."""

from __future__ import annotations

import importlib
import math
import os
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

# Read when vLLM is imported: the engine in this process, no network, no usage report.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.support.kda_engine import Generated, generate, hybrid, kimi, random_prompts
from tests.support.kda_watch import Watch
from tests.support.ties import parted

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.usefixtures("untuned_triton")]


class Model(NamedTuple):
    """A model, and what runs its prefills."""

    make: Callable[[], dict[str, Any]]
    layer: str
    """Class of the KDA layers."""
    kernel: str
    """Of ours."""
    error: float = 0.0
    """Of each of ours' calls at most, against the reference in float64; 0 where stock runs the same kernel."""


KIMI, K3, GLM = "KimiGatedDeltaNetAttention", "KimiK3DeltaAttention", "Glm5NextLinearAttention"
BAILING = "BailingMoeV3KimiDeltaAttention"
LINEAR = partial(kimi, full_rank=False, lower_bound=None)
BOUNDED = partial(kimi, full_rank=False, lower_bound=-5.0)
FULL_RANK = partial(kimi, full_rank=True, lower_bound=-5.0)
NATIVE, TRITON, FLASHKDA = 1e-2, 1.5e-2, 3e-2  # see TOLERANCES in test_kda_prefill.py

SAME_KERNEL = {
    "kimi-linear": Model(LINEAR, KIMI, "triton"),
    "kimi-linear bounded": Model(BOUNDED, KIMI, "triton"),
    "kimi-k3": Model(FULL_RANK, K3, "flashkda"),
    "glm": Model(partial(hybrid, GLM), GLM, "flashkda"),
}
"""Ours runs what stock does, to the bit."""
OTHER_KERNEL = {
    "own linear by native": Model(partial(hybrid, KIMI, None), KIMI, "native", NATIVE),
    "own linear by flashkda": Model(partial(hybrid, KIMI), KIMI, "flashkda", FLASHKDA),
    "own k3 by native": Model(partial(hybrid, K3), K3, "native", NATIVE),
    "glm by native": Model(partial(hybrid, GLM), GLM, "native", NATIVE),
    "bailing by native": Model(partial(hybrid, BAILING), BAILING, "native", NATIVE),
    # Stock rounds the gate and beta in kernels of their own.
    "bailing by triton": Model(partial(hybrid, BAILING), BAILING, "triton", TRITON),
}
"""Ours rounds elsewhere: of models without experts the texts can be compared all the same."""
EXPERTS = {
    "kimi-linear by native": Model(LINEAR, KIMI, "native", NATIVE),
    "kimi-k3 by native": Model(FULL_RANK, K3, "native", NATIVE),
    "kimi-linear bounded by flashkda": Model(BOUNDED, KIMI, "flashkda", FLASHKDA),
}
"""Where another rounding makes a router choose another expert, and texts part anywhere: calls are compared."""
MODELS = SAME_KERNEL | OTHER_KERNEL | EXPERTS
OWN_MODELS = ("own", "glm", "bailing")
TIE, OTHER_TIE, NOISE = 1e-2, 0.2, 0.3
"""Nats between tokens as good as equally likely: of the same kernel, of another; and how far a token's log probability
may move then. Logits of the tests' own models, in bfloat16, are 0.06 apart, and where all outputs and states are wrong
by 1e-2, at random, log probabilities move by 0.12 at most, by 3e-2 by 0.24; a prompt whose state was lost moves by more
than 0.3 in 17 of 25 texts.
"""
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 65536,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 12 << 30,
    "gpu_memory_utilization": 0.2,  # what must be free at the start: tests can run side by side
    "enable_prefix_caching": False,
    "seed": 0,
}
GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}


@pytest.fixture(autouse=True)
def _graphs_of_our_own_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own models can be captured whole only, for decoding; vLLM's are cut where their layers say."""
    own = any(name in request.node.name for name in OWN_MODELS)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0" if own else "1")


def plugin(kernel: str) -> dict[str, Any]:
    """A fresh one each time: the engine writes into it."""
    return {"kda_plugin": {"prefill": kernel}}


def ours(tmp_path: pathlib.Path, name: str, prompts: list[list[int]], **options: Any) -> Generated:
    """Run ours; the class is asserted and, where stock has another kernel, that each call is near to the reference."""
    make, layer, kernel, error = MODELS[name]
    if name.startswith("glm"):
        try:
            importlib.import_module("vllm.models.glm5next.common.kda")
        except ImportError as failure:
            pytest.skip(f"vLLM's GLM-5.3-Flash cannot be imported: {failure}")
    watch = Watch(error) if error else None
    settings = SETTINGS | {"additional_config": plugin(kernel)} | options
    found = generate(tmp_path / "ours", make(), prompts, ours=True, watch=watch, **settings)
    assert found.kda_layers == {f"Workspace{layer}: {kernel}"}
    assert found.fewest_prefills > 0
    if watch is not None:
        watch.check()
        assert watch.calls >= found.fewest_prefills  # but for those of the warm-up, of each of two or three layers
        print(f"{name}: {watch.calls} calls, {watch.continued} sequences continued, {watch.checkpoints} checkpoints")
        print(f"{name}: largest errors {watch.worst}")
    return found


def both(tmp_path: pathlib.Path, name: str, prompts: list[list[int]], **options: Any) -> Generated:
    """Run ours and stock; their texts part at ties only."""
    make, layer, _, error = MODELS[name]
    found = ours(tmp_path, name, prompts, **options)
    settings = SETTINGS | {"additional_config": {}} | options
    stock = generate(tmp_path / "stock", make(), prompts, ours=False, **settings)
    assert stock.kda_layers == {f"{layer}: stock"}
    assert sum(len(set(tokens)) > 10 for tokens in stock.tokens) > 0.8 * len(prompts), "the texts hardly vary"
    tie, noise = (OTHER_TIE, NOISE) if error else (TIE, math.inf)
    ties = parted(stock.tokens, found.tokens, stock.likely, found.likely, tie, noise)
    for line in ties:
        print(f"tie: {name}, {line}")
    # With another kernel half the texts part within 32 tokens.
    assert len(ties) <= (0.9 if error else 0.1) * len(prompts), "\n".join(ties)
    return found


MODES = {"eager": {"enforce_eager": True}, "graphs": GRAPHS}
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, *(37 * n % 900 + 3 for n in range(54))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SAME_KERNEL)
def test_tokens_of_stock(tmp_path: pathlib.Path, name: str, mode: str) -> None:
    """64 prompts at once, and among them two of 60 thousand tokens, in chunks."""
    found = both(tmp_path, name, random_prompts([*LENGTHS, 60_000, 61_234]), **MODES[mode])
    assert found.fewest_prefills > 14


@pytest.mark.parametrize("name", OTHER_KERNEL)
def test_tokens_of_stock_by_another_kernel(tmp_path: pathlib.Path, name: str) -> None:
    """64 prompts at once, the longest in chunks."""
    found = both(
        tmp_path, name, random_prompts([*LENGTHS, 3000, 9000]), enforce_eager=True, max_num_batched_tokens=2048
    )
    assert found.fewest_prefills > 14


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXPERTS)
def test_calls_by_another_kernel(tmp_path: pathlib.Path, name: str, mode: str) -> None:
    """The same prompts, and one of 12 thousand tokens."""
    found = ours(tmp_path, name, random_prompts([*LENGTHS, 3000, 12_000]), max_num_batched_tokens=4096, **MODES[mode])
    assert found.fewest_prefills > 7


def test_our_kernel_is_taken_by_itself(tmp_path: pathlib.Path) -> None:
    watch = Watch(NATIVE)
    found = generate(
        tmp_path, FULL_RANK(), random_prompts([*LENGTHS, 3000, 9000]), ours=True, watch=watch, **SETTINGS, **GRAPHS
    )
    assert found.kda_layers == {f"Workspace{K3}: native"}
    assert found.fewest_prefills > 7
    watch.check()


@pytest.mark.parametrize("name", ["kimi-k3", "own linear by native", "own k3 by native"])
def test_prefix_cache_hits(tmp_path: pathlib.Path, name: str) -> None:
    """In the second round, from a checkpoint inside the first round's prefills."""
    shared = random_prompts([9000], seed=7)[0]
    prompts = [shared + tail for tail in random_prompts([300, 17, 2000, 5, 64, 128], seed=8)]
    found = both(tmp_path, name, prompts, rounds=2, enforce_eager=True, enable_prefix_caching=True)
    assert found.cached_tokens > 0


@pytest.mark.parametrize("name", ["kimi-linear", "kimi-k3", "kimi-linear by native"])
def test_speculative_tokens_beside_prefills(tmp_path: pathlib.Path, name: str) -> None:
    """Texts that repeat, so that their n-grams foretell something, started while others still decode."""
    prompts = [prompt * 12 for prompt in random_prompts([5 + n for n in range(24)], seed=3)]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 128, "max_model_len": 4096, "max_tokens": 48}
    run = ours if name in EXPERTS else both
    run(tmp_path, name, prompts, enforce_eager=True, speculative_config=speculative, **options)


def test_steps_of_the_most_tokens_and_sequences(tmp_path: pathlib.Path) -> None:
    """vLLM has locked its workspace after the capture of graphs; nothing may be larger than what was reserved."""
    prompts = random_prompts([1] * 64 + [8192, 4000])
    both(tmp_path, "kimi-k3", prompts, **GRAPHS)


def test_sleep(tmp_path: pathlib.Path) -> None:
    """After a sleep in which weights lie on the host the tokens are the same."""

    def nap(llm: Any) -> None:
        llm.sleep(level=1)
        llm.wake_up()

    prompts = random_prompts([700, 3, 64, 3000])
    make, _, kernel, _ = MODELS["kimi-k3"]
    options = SETTINGS | {"enforce_eager": True, "ours": True, "additional_config": plugin(kernel)}
    awake = generate(tmp_path, make(), prompts, **options)
    slept = generate(tmp_path, make(), prompts, rounds=2, between=nap, enable_sleep_mode=True, **options)
    assert slept.fewest_prefills > awake.fewest_prefills > 0
    assert slept.tokens == awake.tokens
