"""``vllm-kda bench serve``: time to first token and tokens per second of two attention backends in vLLM's engine.

Both engines live at the same time and are given the same prompts, in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json as json_module
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from vllm_kda_plugin.bench import timing
from vllm_kda_plugin.bench.serve_engine import MEMORY_SHARE, BenchError, Engine, end_engines, prepare_environment
from vllm_kda_plugin.tiny_model import write_config, write_model

_PIPE_COLUMNS = 160
_CPU_CACHE_BYTES = 256 << 20
# Attention as in the models that serve long prompts, and as little else as there can be around it.
_LARGE_MODEL: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@dataclasses.dataclass(frozen=True)
class Load:
    """What both engines are asked: each round a new prompt of every length, and batches of prompts to decode from."""

    prompt_tokens: tuple[int, ...]
    chunk: int
    """Prompt tokens computed in one step."""
    rounds: int
    decode_batches: int
    """In a round: short, and at the mercy of the host, they vary more than long prompts do."""
    decode_requests: int
    decode_prompt_tokens: int
    decode_tokens: int
    """Generated for each request."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return max(max(self.prompt_tokens) + 1, self.decode_prompt_tokens + self.decode_tokens)


GPU_LOAD = Load((32768, 65536, 131072), 8192, 7, 4, 8, 1024, 257)
CPU_LOAD = Load((256, 512, 1024), 128, 3, 1, 2, 64, 17)


def run(
    model: str | None,
    backends: Sequence[str] | None,
    prompt_tokens: Sequence[int] | None,
    chunk: int | None,
    eager: bool,
    json: Path | None,
    plot: Path | None,
) -> int:
    """Measure, print and write; returns the exit code for the shell.

    Args:
        model: a folder or model name, None for random weights.
        backends: two values of ``--attention-backend``, None for ours and the platform's.
        prompt_tokens: lengths of the prompts, None for the usual ones.
        chunk: prompt tokens computed in one step, None for the usual number.
        eager: neither compile the model nor use CUDA graphs.
        json: where all samples go, if anywhere.
        plot: where the plot goes, if anywhere; its format is that of its extension.
    """
    prepare_environment(offline=model is None)
    try:
        if plot is not None:
            from vllm_kda_plugin.bench.serve_plot import save
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        load = _load(on_cpu, prompt_tokens, chunk)
        names = list(backends or ["CUSTOM", "CPU_ATTN" if on_cpu else "FLASH_ATTN"])
        with tempfile.TemporaryDirectory(prefix="vllm-kda-bench-") as folder:
            signal.signal(signal.SIGTERM, functools.partial(_end, folder))
            settings, randomize = engine_settings(model, Path(folder), load, eager, on_cpu)
            if on_cpu:
                print("On a CPU torch gathers, and what is asked is little: the figures say nothing about a GPU.")
            report = _measure_in_engines(names, randomize, settings, load)
        report["settings"]["model"] = model or "random weights"  # the folder is gone
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        hint = {
            "matplotlib": 'Plots need matplotlib; run: pip install "vllm-kda-plugin[bench]"',
            "vllm": "vLLM is not installed for this Python; `vllm-kda doctor` says what to install.",
        }
        print(hint.get(missing, str(error)), file=sys.stderr)
        return 1
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; no engine is left running.", file=sys.stderr)
        return 130
    show(report)
    if json is not None:
        json.write_text(json_module.dumps(report, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        save(report, plot)
    return 0


def engine_settings(
    model: str | None, folder: Path, load: Load, eager: bool, on_cpu: bool
) -> tuple[dict[str, Any], bool]:
    """Arguments of ``vllm.LLM`` for both engines, and whether their weights are still to be made.

    A model with random weights is written to ``folder`` if none is given: a small one on a CPU.
    """
    settings: dict[str, Any] = {
        "max_model_len": load.max_model_len,
        "max_num_batched_tokens": load.chunk,
        "max_num_seqs": load.decode_requests,
        "enforce_eager": eager or on_cpu,  # the CPU build compiles for minutes
    }
    if on_cpu:
        settings |= {"dtype": "float32", "kv_cache_memory_bytes": _CPU_CACHE_BYTES}
    else:
        settings["gpu_memory_utilization"] = MEMORY_SHARE
    if model is not None:
        return settings | {"model": model}, False
    if on_cpu:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        return settings | {"model": str(write_model(folder, max_position_embeddings=load.max_model_len))}, False
    write_config(folder, max_position_embeddings=load.max_model_len, **_LARGE_MODEL)
    return settings | {"model": str(folder), "load_format": "dummy"}, True


def measure(engines: Sequence[Engine], load: Load) -> dict[str, Any]:
    """Ask both engines the same, in turn, and the other one first in the next round.

    Returns:
        ``first_token`` for each length, ``decode`` and ``tokens`` of the report, see :func:`run`.
    """
    rng = random.Random(0)
    vocab_size = min(engine.vocab_size for engine in engines)

    def prompt(length: int) -> list[int]:
        return rng.choices(range(vocab_size), k=length)

    lengths = load.prompt_tokens
    seconds: dict[int, list[list[float]]] = {length: [[] for _ in engines] for length in lengths}
    speeds: list[list[float]] = [[] for _ in engines]
    first: list[list[list[int]]] = [[] for _ in engines]
    decoded: list[list[list[int]]] = [[] for _ in engines]
    for number in range(-1, load.rounds):  # the first is for warming up
        turns = list(enumerate(engines))[:: -1 if number % 2 else 1]
        for length in lengths:
            asked = prompt(length)
            for index, engine in turns:
                passed_s, token = engine.first_token(asked)
                if number >= 0:
                    seconds[length][index].append(passed_s)
                    first[index].append(token)
        for turn in range(load.decode_batches):
            batch = [prompt(load.decode_prompt_tokens) for _ in range(load.decode_requests)]
            for index, engine in turns[:: -1 if turn % 2 else 1]:
                speed, tokens = engine.decode(batch, load.decode_tokens)
                if number >= 0:
                    speeds[index].append(speed)
                    decoded[index] += tokens
    return {
        "first_token": [{"prompt_tokens": n, **compare(seconds[n], "s", smaller_is_faster=True)} for n in lengths],
        "decode": compare(speeds, "tokens_per_s", smaller_is_faster=False),
        "tokens": {"first": differing(*first), "decoded": differing(*decoded)},
    }


def compare(samples: Sequence[Sequence[float]], unit: str, *, smaller_is_faster: bool) -> dict[str, Any]:
    """Medians of two engines' samples, and how many times as fast as the second the first is.

    Args:
        samples: for each engine one a round.
        unit: of the samples, for their name.
        smaller_is_faster: whether they are times, not speeds.

    Returns:
        ``samples_UNIT``, ``median_UNIT``, ``ratio`` of the medians and ``round_ratios``, above 1 where the first engine
        is faster.
    """

    def ratio(one: float, other: float) -> float:
        return other / one if smaller_is_faster else one / other

    medians = [statistics.median(values) for values in samples]
    return {
        f"samples_{unit}": [list(values) for values in samples],
        f"median_{unit}": medians,
        "ratio": ratio(*medians),
        "round_ratios": [ratio(*pair) for pair in zip(*samples, strict=True)],
    }


def differing(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many prompts' tokens are not the same in both engines.

    Returns:
        ``prompts``: how many there are; ``distinct``: tokens that occur at all in ``one``; ``differ_at``: for each
        prompt that differs, the place of the first other token.
    """
    places = []
    for tokens, others in zip(one, other, strict=True):
        unequal = [place for place, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]]
        places += unequal[:1]
    return {"prompts": len(one), "distinct": len({token for tokens in one for token in tokens}), "differ_at": places}


def show(report: dict[str, Any]) -> None:
    """Print the table of a report, which attention ran, and whether the tokens are the same."""
    names = [engine["backend"] for engine in report["engines"]]
    load = report["load"]
    table = Table(title=f"Medians of {load['rounds']} rounds in the engine", title_justify="left")
    table.add_column("")
    for name in (*names, "ratio", "of a round"):
        table.add_column(name, justify="right")
    for row in report["first_token"]:
        tokens = row["prompt_tokens"]
        cells = [f"{1e3 * s:,.1f} ms, {tokens / s:,.0f} tokens/s" for s in row["median_s"]]
        table.add_row(f"first token of a prompt of {tokens:,}", *cells, *_ratio_cells(row))
    row = report["decode"]
    cells = [f"{speed:,.0f} tokens/s" for speed in row["median_tokens_per_s"]]
    table.add_row(f"decode, {load['decode_requests']} requests", *cells, *_ratio_cells(row))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    console.print(table)
    print(f"ratio: how many times as fast as {names[1]} {names[0]} is; beside it the lowest and highest of a round.")
    for engine in report["engines"]:
        stats = engine["stats"]
        counts = ", ".join(f"{key.replace('_', ' ')} {stats[key]:,}" for key in stats if key != "implementation")
        ran = ", ".join(engine["classes"])
        print(f"{engine['backend']} ran {ran}" + (f": {counts}" if stats["implementation"] else ""))
    for what, title in (("first", "First tokens"), ("decoded", f"{load['decode_tokens']} decoded tokens")):
        found = report["tokens"][what]
        places = ", ".join(str(place) for place in found["differ_at"])
        said = f"different for {len(found['differ_at'])}, from token {places} on" if places else "the same in both"
        print(f"{title} of {found['prompts']} prompts, {found['distinct']} distinct ones: {said}")
    if any(found["differ_at"] for found in report["tokens"].values()) and not report["settings"]["enforce_eager"]:
        print("Each engine tunes the kernels of its compiled model: two of stock differ as well. Compare with --eager.")


def _ratio_cells(row: dict[str, Any]) -> list[str]:
    lowest, highest = min(row["round_ratios"]), max(row["round_ratios"])
    return [f"{row['ratio']:.3f}x", f"{lowest:.3f} to {highest:.3f}"]


def _end(folder: str, number: int, frame: FrameType | None) -> NoReturn:
    """Told to end. An exception would not do: one that comes while an engine starts is lost in ZeroMQ's bindings."""
    end_engines()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def _load(on_cpu: bool, prompt_tokens: Sequence[int] | None, chunk: int | None) -> Load:
    usual = CPU_LOAD if on_cpu else GPU_LOAD
    return dataclasses.replace(
        usual, prompt_tokens=tuple(prompt_tokens or usual.prompt_tokens), chunk=chunk or usual.chunk
    )


def _measure_in_engines(names: Sequence[str], randomize: bool, settings: dict[str, Any], load: Load) -> dict[str, Any]:
    with contextlib.ExitStack() as closing:
        engines = []
        for name in names:
            print(f"Starting vLLM with {name} ...", flush=True)
            engine = Engine(name, randomize, settings)
            closing.callback(engine.close)
            engines.append(engine)
        # Not before: an engine must not inherit a CUDA context.
        report: dict[str, Any] = timing.describe(timing.choose_device())
        report |= {"load": dataclasses.asdict(load), "settings": settings}
        print(f"{load.rounds} rounds of prompts of {', '.join(f'{n:,}' for n in load.prompt_tokens)} tokens ...")
        sys.stdout.flush()
        report |= measure(engines, load)
        report["engines"] = [{"backend": engine.backend, **engine.attention()} for engine in engines]
    return report
