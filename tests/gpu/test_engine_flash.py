"""The real engine on CUDA: prefills on fresh and gathered K and V give the tokens of stock, step after step.

In 16 bit two right kernels round differently, and each layer makes more of it. So models have one or two layers, and
where tokens part the two candidates must be as good as equal.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import resource
from typing import Any

# Read when vLLM is imported: the engine in this process, no network, no usage report.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import pytest
import torch

from tests.support.engine import Run, candidates, engine, implementations, prompts, run
from tests.support.ties import parted
from vllm_kda_plugin.attention.stats import STATS
from vllm_kda_plugin.tiny_model import write_model

OURS = "CUSTOM"
STOCK = "FLASH_ATTN"
CLASSES = {
    STOCK: "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl",
    OURS: "vllm_kda_plugin.attention.flash.GatherFlashAttentionImpl",
}
MODEL: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A model's dtype and depth, and how far log-probabilities may then be from stock's: see ``support/ties.py``.

    A key too many or too few moves them further than ``noise``.
    """

    dtype: str
    layers: int
    tie: float
    noise: float


ONE_LAYER = Numbers("float16", 1, 0.01, 0.05)
TWO_LAYERS = Numbers("float16", 2, 0.05, 0.15)
# Logits of 8 to 16 are multiples of 0.0625 then: neighbours are the nearest that are not equal.
BFLOAT16 = Numbers("bfloat16", 1, 0.07, 0.3)


def plugin(gather: str, **settings: Any) -> dict[str, Any]:
    return {"kda_plugin": {"gather": gather, **settings}}


class Models:
    """Written when first asked for, with what stock made of them."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.stock: dict[str, Run] = {}

    def path(self, numbers: Numbers, **config: Any) -> str:
        folder = self.root / "-".join([str(numbers.layers), *config])
        return str(write_model(folder, num_hidden_layers=numbers.layers, **MODEL, **config))

    def check(
        self,
        texts: list[str],
        gather: str = "always",
        *,
        numbers: Numbers = TWO_LAYERS,
        model: str = "",
        workspace_mib: int = 256,
        **settings: Any,
    ) -> Run:
        """Run both backends and compare; returns ours."""
        given = {"dtype": numbers.dtype, "logprobs": 8, "max_tokens": 32, **settings}
        model = model or self.path(numbers)
        # Stock runs are shared by tests that differ in what only we do; which model runner it is, is in a variable.
        key = repr((model, texts, sorted(given.items()), os.environ.get("VLLM_USE_V2_MODEL_RUNNER")))
        if key not in self.stock:
            self.stock[key] = run(model, texts, backend=STOCK, **given)
        stock = self.stock[key]
        config = plugin(gather, gather_workspace_mib=workspace_mib)
        ours = run(model, texts, backend=OURS, additional_config=config, **given)
        assert stock.implementations == {CLASSES[STOCK]}
        assert ours.implementations == {CLASSES[OURS]}
        for number, tokens in enumerate(stock.rounds):
            assert len({token for line in tokens for token in line}) >= 20, "too few distinct tokens to prove anything"
            likely = stock.logprobs[number], ours.logprobs[number]
            ties = parted(tokens, ours.rounds[number], *likely, numbers.tie, numbers.noise)
            print(f"round {number}: {len(ties)} of {len(tokens)} prompts part at a tie", *ties, sep="\n  ")
        return ours


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["1", "0"], ids=["runner V2", "runner V1"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)


CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 2048}


@pytest.mark.parametrize("numbers", [ONE_LAYER, BFLOAT16], ids=lambda numbers: str(numbers.dtype))
def test_200_prompts(models: Models, numbers: Numbers) -> None:
    ours = models.check(prompts(200, 400), numbers=numbers, max_tokens=64, max_num_seqs=64, max_num_batched_tokens=2048)
    assert ours.fresh_calls > 0
    assert ours.gathers > 0  # of prompts that a step's end cut in two


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_chunked_prefill(models: Models, eager: bool) -> None:
    texts = prompts(8, 1900, shortest=600)
    ours = models.check(texts, enforce_eager=eager, **CHUNKED)
    assert ours.gathers > 0


@pytest.mark.usefixtures("runner")
def test_prefix_cache_hits(models: Models) -> None:
    shared = prompts(1, 900, seed=7, shortest=900)[0]
    texts = [shared + tail for tail in prompts(6, 200, seed=8)]
    ours = models.check(texts, rounds=2, max_model_len=2048)
    assert ours.cached_tokens[1] >= 6 * 896
    assert ours.gathers > 0


def test_preemption(models: Models) -> None:
    texts = prompts(12, 250, shortest=150)
    ours = models.check(texts, max_tokens=64, block_size=32, num_gpu_blocks_override=50)
    assert ours.preemptions > 0
    assert ours.fresh_calls > 0


def test_sliding_window(models: Models) -> None:
    path = models.path(TWO_LAYERS, sliding_window=300, layer_types=["sliding_attention", "full_attention"])
    texts = prompts(6, 1500, shortest=500)
    ours = models.check(texts, model=path, **CHUNKED)
    assert ours.gathers > 0


@pytest.mark.parametrize("gather", ["always", "auto"])
def test_long_prompts(models: Models, gather: str) -> None:
    """Of three long prompts each chunk but the first has a context worth gathering on an H200."""
    if gather == "auto" and torch.cuda.get_device_name() != "NVIDIA H200":
        pytest.skip("defaults for this GPU do not come with the package")
    texts = prompts(3, 26_000, shortest=20_000)
    settings: dict[str, Any] = {"max_model_len": 32768, "max_num_batched_tokens": 4096, "max_num_seqs": 4}
    ours = models.check(texts, gather, kv_cache_memory_bytes=512 << 20, **settings)
    assert ours.gathers > 0


def test_context_in_parts(models: Models) -> None:
    """What does not fit the workspace is gathered in parts, whose results are merged."""
    texts = prompts(3, 9_000, shortest=6_000)
    settings: dict[str, Any] = {"max_model_len": 16384, "max_num_batched_tokens": 512, "max_num_seqs": 4}
    whole = models.check(texts, **settings)
    parts = models.check(texts, workspace_mib=4, **settings)
    assert parts.gathers > whole.gathers > 0


@pytest.mark.parametrize("workspace_mib", [8, 256])
def test_workspace_is_not_asked_for_more_once_locked(models: Models, workspace_mib: int) -> None:
    """Prompts as long as the model takes, as many in a step as there can be, whole, cached and half cached."""
    from vllm import SamplingParams
    from vllm.v1.worker.workspace import current_workspace_manager

    longest, together = 16384, 4
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(256), k=count)

    with engine(
        models.path(TWO_LAYERS),
        OURS,
        dtype="float16",
        enforce_eager=False,
        max_model_len=longest,
        max_num_batched_tokens=together * longest,
        max_num_seqs=together,
        kv_cache_memory_bytes=512 << 20,
        additional_config=plugin("always", gather_workspace_mib=workspace_mib),
    ) as llm:
        assert implementations(llm) == {CLASSES[OURS]}
        assert current_workspace_manager().is_locked()
        fresh_calls, gathers = STATS.fresh_calls, STATS.gathers
        whole = [tokens(longest - 1) for _ in range(together)]
        halves = [prompt[: longest // 2] + tokens(longest // 2 - 1) for prompt in whole]
        mixed = [whole[0], tokens(1), halves[1][: longest // 2 + 100], tokens(longest - 1)]
        for batch in (whole, whole, halves, mixed):
            asked = [{"prompt_token_ids": prompt} for prompt in batch]
            llm.generate(asked, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert STATS.fresh_calls > fresh_calls
        assert STATS.gathers > gathers


@dataclasses.dataclass
class Soak:
    """What came of many requests."""

    tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    candidates: dict[str, list[dict[int, float]]] = dataclasses.field(default_factory=dict)
    aborted: int = 0
    device_bytes: list[int] = dataclasses.field(default_factory=list)
    """Allocated, at each step."""
    host_kib: list[int] = dataclasses.field(default_factory=list)
    """Most memory of this process so far, at each step."""


def soak(llm: Any, count: int) -> Soak:
    """Requests of random lengths, some of the same beginnings, some aborted while they wait, prefill or decode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(2)
    beginnings = [rng.choices(range(256), k=rng.randint(50, 400)) for _ in range(8)]
    llm_engine, done = llm.llm_engine, Soak()
    doomed: dict[str, int] = {}
    started = step = 0
    while started < count or llm_engine.has_unfinished_requests():
        for _ in range(min(rng.choice([0, 0, 1, 2, 6]), count - started)):
            prompt = rng.choice([[], *beginnings]) + rng.choices(range(256), k=rng.randint(1, 300))
            sampling = SamplingParams(
                temperature=0,
                max_tokens=rng.randint(1, 48),
                ignore_eos=True,
                logprobs=8,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            llm_engine.add_request(str(started), {"prompt_token_ids": prompt}, sampling)
            if rng.random() < 0.2:
                doomed[str(started)] = step + rng.randint(0, 12)
            started += 1
        for output in llm_engine.step():
            doomed.pop(output.request_id, None)
            done.tokens[output.request_id] = list(output.outputs[0].token_ids)
            done.candidates[output.request_id] = candidates(output)
        due = [request for request, when in doomed.items() if when <= step]
        if due:
            llm_engine.abort_request(due)
            done.aborted += len(due)
            for request in due:
                del doomed[request]
        done.device_bytes.append(torch.cuda.memory_allocated())
        done.host_kib.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        step += 1
    for _ in range(3):  # what is still on its way with asynchronous scheduling
        llm_engine.step()
    return done


def free_blocks(llm: Any) -> tuple[int, int]:
    """Blocks of the KV cache that no request holds, and all but the null block."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1


def test_a_thousand_requests(models: Models) -> None:
    came: dict[str, Soak] = {}
    for backend in (STOCK, OURS):
        gathers = STATS.gathers
        with engine(
            models.path(TWO_LAYERS),
            backend,
            dtype="float16",
            max_model_len=1024,
            max_num_batched_tokens=256,
            max_num_seqs=32,
            num_gpu_blocks_override=96,
            block_size=32,
            additional_config=plugin("always"),
        ) as llm:
            assert implementations(llm) == {CLASSES[backend]}
            came[backend] = soak(llm, 1000)
            free, blocks = free_blocks(llm)
            assert free == blocks
            preemptions = sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
            assert preemptions > 0
    assert STATS.gathers > gathers
    ours = came[OURS]
    assert ours.aborted > 50
    assert len(ours.tokens) + ours.aborted == 1000
    both = sorted(came[STOCK].tokens.keys() & ours.tokens.keys(), key=int)
    assert len(both) > 700
    tokens, our_tokens = ([came[name].tokens[request] for request in both] for name in (STOCK, OURS))
    likely, our_likely = ([came[name].candidates[request] for request in both] for name in (STOCK, OURS))
    print(*parted(tokens, our_tokens, likely, our_likely, TWO_LAYERS.tie, TWO_LAYERS.noise), sep="\n")
    quarter = len(ours.device_bytes) // 4
    early, late = ours.device_bytes[quarter : 2 * quarter], ours.device_bytes[-quarter:]
    assert max(late) - max(early) < 4 << 20
    assert ours.host_kib[-1] - ours.host_kib[2 * quarter] < 100 << 10
