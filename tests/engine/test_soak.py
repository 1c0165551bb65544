"""Many random requests through the engine, with our backend and with vLLM's own: the same tokens, and nothing left.

``VLLM_KDA_SOAK_REQUESTS=10000 pytest -o faulthandler_timeout=0`` makes it long, ``VLLM_KDA_SOAK_SEED`` makes other
requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import statistics
import string
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.engine.conftest import ModelFactory
from tests.support.engine import IMPLEMENTATION, engine, implementations
from tests.support.ties import parted
from vllm_kda_plugin.attention.stats import STATS

pytestmark = pytest.mark.engine

STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"
# Taken out of the environment: the plugin refuses variables of such names that it does not know.
REQUESTS = int(os.environ.pop("VLLM_KDA_SOAK_REQUESTS", "120"))
SEED = int(os.environ.pop("VLLM_KDA_SOAK_SEED", "0"))
IN_FLIGHT = 16
LONGEST = 320
MOST_TOKENS = 48
# A step may take this long; beyond it the engine hangs.
STEPS_A_REQUEST = 200
TIE, NOISE = 1e-3, 1e-3
# What resident memory may grow by between the first third and the last, an hour of requests or a minute.
GROWTH = 48 << 20
# 36 blocks hold 1,152 tokens, of 16 requests that are up to 368 long each: some must be preempted. A MiB of workspace
# holds 1,024, and a step takes 96 tokens, so gathers are split and prompts come in chunks.
ENGINE: dict[str, Any] = {
    "block_size": 32,
    "num_gpu_blocks_override": 36,
    "max_num_seqs": IN_FLIGHT,
    "max_num_batched_tokens": 96,
    "enable_prefix_caching": True,
    "additional_config": {"kda_plugin": {"gather_workspace_mib": 1}},
}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A request, and what is done to it."""

    prompt: str
    sampling: dict[str, Any]
    logprobs: int | None
    """How many candidates it asks for; stock is always asked for five, to know ties by."""
    abort_after: int | None
    """Aborted once it has so many tokens; at 0 before its first step."""


def wanted(seed: int, number: int) -> Wanted:
    """Request ``number``, the same for both engines, however many there are."""
    rng = random.Random(f"{seed} {number}")
    alphabet = string.printable[:95]
    shared = random.Random(f"{seed} prefix {rng.randrange(4)}")
    prefix = "".join(shared.choices(alphabet, k=shared.randint(40, 200))) if rng.random() < 0.5 else ""
    prompt = prefix + "".join(rng.choices(alphabet, k=rng.randint(1, LONGEST - len(prefix))))
    # One candidate only is as good as greedy, which vLLM does for one completion alone. It needs no seed, with which
    # vLLM's CPU engine ends at a prompt that comes in chunks: "CPU Generator does not use offset".
    alike = {"temperature": 1.0, "top_k": 1, "n": rng.randint(2, 3)}
    sampling: dict[str, Any] = alike if rng.random() < 0.15 else {"temperature": 0.0}
    sampling |= {"max_tokens": rng.randint(1, MOST_TOKENS), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.25:
        sampling["stop"] = rng.sample(string.ascii_letters, 8)
    abort_after = rng.randrange(sampling["max_tokens"]) if rng.random() < 0.15 else None
    return Wanted(prompt, sampling, rng.choice([None, None, 0, 1, 5]), abort_after)


@dataclasses.dataclass
class Soaked:
    """What an engine did, and what it was left with."""

    answers: pathlib.Path
    """A line of JSON for each request that was not aborted: number, and of each completion tokens, text and so on."""
    aborted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    implementations: set[str] = dataclasses.field(default_factory=set)
    gathers: int = 0
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    """What should be 0 when all is done."""
    resident: list[int] = dataclasses.field(default_factory=list)
    """Bytes of this process, each time that a request ended."""


Running = dict[str, tuple[Wanted, dict[int, Any]]]
"""By request number what is wanted and its completions so far."""


def soak(model: str, backend: str | None, answers: pathlib.Path, *, ours: bool) -> Soaked:
    """Send every request, ``IN_FLIGHT`` at a time, and abort those that are to be."""
    from vllm import SamplingParams

    process, done = psutil.Process(), Soaked(answers)
    gathers = STATS.gathers
    with contextlib.ExitStack() as stack:
        llm = stack.enter_context(engine(model, backend, **ENGINE))
        lines = stack.enter_context(answers.open("w"))
        done.implementations = implementations(llm)
        vllm, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        running: Running = {}
        number = steps = 0
        while number < REQUESTS or running:
            while number < REQUESTS and len(running) < IN_FLIGHT:
                request = wanted(SEED, number)
                logprobs = request.logprobs if ours else 5
                params = SamplingParams(**request.sampling, logprobs=logprobs)
                vllm.add_request(str(number), request.prompt, params)
                running[str(number)] = request, {}
                if request.abort_after == 0:
                    _abort(vllm, running, str(number), done)
                number += 1
            steps += 1
            assert steps < STEPS_A_REQUEST * REQUESTS, f"these make no progress: {sorted(running)}"
            gone: set[str] = set()
            for output in vllm.step():
                if output.request_id in gone:  # another completion of it
                    continue
                request, completions = running[output.request_id]
                completions |= {completion.index: completion for completion in output.outputs}
                made = max(len(completion.token_ids) for completion in completions.values())
                if output.finished:
                    del running[output.request_id]
                    done.cached_tokens += output.num_cached_tokens or 0
                    done.resident.append(process.memory_info().rss)
                    if request.abort_after is None:
                        lines.write(json.dumps([int(output.request_id), _ends(completions)]) + "\n")
                elif request.abort_after is not None and made >= request.abort_after:
                    _abort(vllm, running, output.request_id, done)
                    gone.add(output.request_id)
        for _ in range(2):  # the worker hears of the last ones that went in the next step
            llm.generate("a", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        runner = core.model_executor.driver_worker.worker.model_runner
        done.left = {
            "blocks of the pool": free - pool.get_num_free_blocks(),
            "requests of the scheduler": len(core.scheduler.requests),
            "waiting": len(core.scheduler.waiting),
            "requests of the frontend": vllm.get_num_unfinished_requests(),
            "requests of the worker but for the last": max(len(runner.requests) - 1, 0),
        }
        done.preemptions = sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    done.gathers = STATS.gathers - gathers
    return done


def _abort(vllm: Any, running: Running, number: str, done: Soaked) -> None:
    vllm.abort_request([number])
    del running[number]
    done.aborted += 1


def _ends(completions: dict[int, Any]) -> list[Any]:
    """Of each completion its tokens, their candidates, and how it ended."""
    return [
        [
            list(completion.token_ids),
            [[[token, said.logprob] for token, said in place.items()] for place in completion.logprobs or []],
            [completion.text, completion.finish_reason, completion.stop_reason],
        ]
        for _, completion in sorted(completions.items())
    ]


def answers_of(path: pathlib.Path) -> dict[int, list[Any]]:
    with path.open() as lines:
        return dict(json.loads(line) for line in lines)


def compare(stock: dict[int, list[Any]], ours: dict[int, list[Any]]) -> list[str]:
    """Ties, a line each; AssertionError for whatever else is not as with stock."""
    assert sorted(stock) == sorted(ours)
    ties: list[str] = []
    for number in sorted(stock):
        assert len(stock[number]) == len(ours[number])
        for (tokens, likely, end), (our_tokens, our_likely, our_end) in zip(stock[number], ours[number], strict=True):
            # After a tie one may stop sooner than the other.
            length = min(len(tokens), len(our_tokens))
            candidates = [dict(place) for place in likely[:length]]
            # Where ours was not asked for candidates, stock's decide: ours is never the one that says tie.
            our_candidates = [dict(place) for place in our_likely[:length]] or [
                {token: place.get(token, 0.0)} for token, place in zip(our_tokens[:length], candidates, strict=True)
            ]
            try:
                found = parted(
                    [tokens[:length]], [our_tokens[:length]], [candidates], [our_candidates], tie=TIE, noise=NOISE
                )
            except AssertionError as error:
                raise AssertionError(f"request {number}: {error}") from None
            ties += [f"request {number}, {line}" for line in found]
            if not found:
                assert (tokens, end) == (our_tokens, our_end), f"request {number} ended otherwise"
    return ties


def grown(resident: list[int]) -> int:
    """Bytes between the first third, its first half left out, and the last."""
    third = len(resident) // 3
    return int(statistics.median(resident[-third:]) - statistics.median(resident[third // 2 : third]))


def test_soak(model: ModelFactory, tmp_path: pathlib.Path) -> None:
    stock = soak(model(), "CPU_ATTN", tmp_path / "stock", ours=False)
    ours = soak(model(), "CUSTOM", tmp_path / "ours", ours=True)

    assert stock.implementations == {STOCK}
    assert stock.gathers == 0
    assert ours.implementations == {IMPLEMENTATION}
    assert STATS.implementation == IMPLEMENTATION
    assert ours.gathers > REQUESTS
    for done in (stock, ours):
        assert not any(done.left.values()), done.left
        assert done.preemptions > REQUESTS // 40
        assert done.aborted > REQUESTS // 20
        assert done.cached_tokens > REQUESTS
    assert grown(ours.resident) < GROWTH

    expected = answers_of(stock.answers)
    ends = [end for completions in expected.values() for _, _, end in completions]
    assert len(ends) > len(expected) > REQUESTS // 2, "some have several completions"
    assert sum(reason is not None for _, _, reason in ends) > REQUESTS // 40, "stop strings stop"
    tokens = [token for completions in expected.values() for made, _, _ in completions for token in made]
    assert len(set(tokens)) > 128, "too few distinct tokens to prove anything"
    ties = compare(expected, answers_of(ours.answers))
    told = f"{len(tokens):,} tokens, {ours.preemptions} preemptions, {ours.aborted} aborted, {ours.gathers:,} gathers"
    print(f"{told}, memory {grown(ours.resident) / 2**20:+.1f} MiB, {len(ties)} ties", *ties, sep="\n")
    assert len(ties) <= len(ends) / 50
