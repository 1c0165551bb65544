"""KDA layers in the real engine on CUDA: the tokens of stock vLLM, apart from ties, which are listed."""

from __future__ import annotations

import importlib
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

from tests.support.kda_engine import Generated, generate, hybrid, kimi, random_prompts, ties

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.usefixtures("untuned_triton")]


class Model(NamedTuple):
    """A model, and what is expected of it."""

    make: Callable[[], dict[str, Any]]
    layer: str
    """Class of the KDA layers."""
    kernel: str
    """Of ours, on Hopper."""
    tie: float = 1e-2
    """Nats between two tokens that are as good as equally likely."""


LINEAR = partial(kimi, full_rank=False, lower_bound=None)
K3 = partial(kimi, full_rank=True, lower_bound=-5.0)
BOUNDED = partial(kimi, full_rank=False, lower_bound=-5.0)
BAILING = partial(hybrid, "BailingMoeV3KimiDeltaAttention")
# Where ours has a kernel that rounds elsewhere than stock's.
OTHER_KERNEL = 0.15
MODELS = {
    "kimi-linear": Model(LINEAR, "KimiGatedDeltaNetAttention", "triton"),
    "kimi-linear bounded": Model(BOUNDED, "KimiGatedDeltaNetAttention", "triton"),
    "kimi-linear by native": Model(LINEAR, "KimiGatedDeltaNetAttention", "native", OTHER_KERNEL),
    "kimi-linear by flashkda": Model(BOUNDED, "KimiGatedDeltaNetAttention", "flashkda", OTHER_KERNEL),
    "kimi-k3": Model(K3, "KimiK3DeltaAttention", "flashkda"),
    "kimi-k3 by native": Model(K3, "KimiK3DeltaAttention", "native", OTHER_KERNEL),
    "glm": Model(partial(hybrid, "Glm5NextLinearAttention"), "Glm5NextLinearAttention", "flashkda"),
    "bailing": Model(BAILING, "BailingMoeV3KimiDeltaAttention", "triton"),
    "bailing by flashkda": Model(BAILING, "BailingMoeV3KimiDeltaAttention", "flashkda", OTHER_KERNEL),
}
OWN_MODELS = ("glm", "bailing")
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


def both(tmp_path: pathlib.Path, name: str, prompts: list[list[int]], **options: Any) -> tuple[Generated, list[str]]:
    """Run stock and ours; the classes are asserted, and that the texts part at ties only."""
    make, layer, kernel, tie = MODELS[name]
    settings = SETTINGS | {"additional_config": plugin(kernel)} | options
    if name == "glm":
        try:
            importlib.import_module("vllm.models.glm5next.common.kda")
        except ImportError as error:
            pytest.skip(f"vLLM's GLM-5.3-Flash cannot be imported: {error}")
    ours = generate(tmp_path / "ours", make(), prompts, ours=True, **settings)
    stock = generate(tmp_path / "stock", make(), prompts, ours=False, **settings)
    assert stock.kda_layers == {f"{layer}: stock"}
    assert ours.kda_layers == {f"Workspace{layer}: {kernel}"}
    assert ours.fewest_prefills > 0
    assert sum(len(set(tokens)) > 10 for tokens in stock.tokens) > 0.8 * len(prompts), "the texts hardly vary"
    found = ties(stock, ours, tie)
    for line in found:
        print(f"tie: {name}, {line}")
    assert len(found) <= max(1, len(prompts) // (2 if tie == OTHER_KERNEL else 10)), "\n".join(found)
    return ours, found


@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_stock(tmp_path: pathlib.Path, name: str, mode: str) -> None:
    """64 prompts at once, and among them two of 60 thousand tokens, in chunks."""
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, *(37 * n % 900 + 3 for n in range(54)), 60_000, 61_234]
    how: dict[str, Any] = {"enforce_eager": True} if mode == "eager" else GRAPHS
    ours, _ = both(tmp_path, name, random_prompts(lengths), **how)
    assert ours.fewest_prefills > 14


@pytest.mark.parametrize("name", ["kimi-linear", "kimi-linear by native", "kimi-k3", "kimi-k3 by native", "glm"])
def test_prefix_cache_hits(tmp_path: pathlib.Path, name: str) -> None:
    shared = random_prompts([9000], seed=7)[0]
    prompts = [shared + tail for tail in random_prompts([300, 17, 2000, 5, 64, 128], seed=8)]
    ours, _ = both(tmp_path, name, prompts, rounds=2, enforce_eager=True, enable_prefix_caching=True)
    assert ours.cached_tokens > 0


@pytest.mark.parametrize("name", ["kimi-linear", "kimi-linear by native", "kimi-k3", "kimi-k3 by native"])
def test_speculative_tokens_beside_prefills(tmp_path: pathlib.Path, name: str) -> None:
    """Texts that repeat, so that their n-grams foretell something, started while others still decode."""
    prompts = [prompt * 12 for prompt in random_prompts([5 + n for n in range(24)], seed=3)]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 128, "max_model_len": 4096, "max_tokens": 48}
    both(tmp_path, name, prompts, enforce_eager=True, speculative_config=speculative, **options)


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
