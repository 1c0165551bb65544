"""What `vllm-kda bench serve` computes and prints, with engines that only keep books."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.image import imread

from vllm_kda_plugin import cli
from vllm_kda_plugin.bench import serve, serve_plot
from vllm_kda_plugin.bench.serve_engine import BenchError, Engine, prepare_environment
from vllm_kda_plugin.tiny_model import write_config

LOAD = serve.Load((30, 50), 8192, 2, 2, 3, 4, 5)


class Generator:
    """Stands for vLLM's ``LLM``; a token depends on the prompt's."""

    def __init__(self, asked: list[tuple[str, int, int]], name: str, attention: dict[str, Any]) -> None:
        self.asked, self.name, self.attention = asked, name, attention

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        outputs = []
        for place, prompt in enumerate(prompts):
            ids, count = prompt["prompt_token_ids"], sampling.max_tokens
            self.asked.append((self.name, hash(tuple(ids)), count))
            tokens = [sum(ids) % 7 + step for step in range(count)]
            metrics = SimpleNamespace(first_token_ts=10.0, last_token_ts=12.0 + place)
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)], metrics=metrics))
        return outputs

    def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "kda_attention"
        return [self.attention]


def engine(backend: str, attention: dict[str, Any] | None = None, asked: list[Any] | None = None) -> Engine:
    made = object.__new__(Engine)
    made.backend, made.vocab_size = backend, 100
    made._llm = Generator([] if asked is None else asked, backend, attention or {})
    return made


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))


@pytest.mark.usefixtures("sampling")
def test_both_are_asked_the_same_in_turn_and_new_prompts_each_round() -> None:
    asked: list[tuple[str, int, int]] = []
    found = serve.measure([engine("A", asked=asked), engine("B", asked=asked)], LOAD)
    # A round: two first tokens and twice three requests to decode, of both; a round to warm up comes first.
    assert len(asked) == 3 * 2 * (2 + 2 * 3)
    assert [name for name, *_ in asked[:: len(asked) // 3]] == ["B", "A", "B"]
    by_name: dict[str, list[tuple[int, int]]] = {"A": [], "B": []}
    for name, *what in asked:
        by_name[name].append((what[0], what[1]))
    assert by_name["A"] == by_name["B"]
    assert len(set(by_name["A"])) == len(by_name["A"])
    assert [row["prompt_tokens"] for row in found["first_token"]] == [30, 50]
    assert all(len(samples) == LOAD.rounds for row in found["first_token"] for samples in row["samples_s"])
    # Three requests of 4 further tokens in 2, 3 and 4 s: the median's pace.
    assert found["decode"]["samples_tokens_per_s"] == [[3 * 4 / 3.0] * 4] * 2
    assert found["decode"]["ratio"] == 1
    assert found["tokens"]["first"]["prompts"] == 4
    assert found["tokens"]["decoded"]["prompts"] == 12
    assert found["tokens"]["decoded"]["differ_at"] == []


def test_ratios_are_above_1_where_the_first_is_faster() -> None:
    times = serve.compare([[1.0, 3.0, 2.0], [4.0, 3.0, 5.0]], "s", smaller_is_faster=True)
    assert times["median_s"] == [2.0, 4.0]
    assert times["ratio"] == 2.0
    assert times["round_ratios"] == [4.0, 1.0, 2.5]
    speeds = serve.compare([[10.0], [8.0]], "tokens_per_s", smaller_is_faster=False)
    assert speeds["ratio"] == 1.25
    assert speeds["samples_tokens_per_s"] == [[10.0], [8.0]]


def test_differing_tokens_are_counted_by_prompt() -> None:
    found = serve.differing([[1, 2, 3], [4, 5, 6], [7, 7, 7]], [[1, 2, 3], [4, 9, 9], [8, 7, 7]])
    assert found == {"prompts": 3, "distinct": 7, "differ_at": [1, 0]}
    with pytest.raises(ValueError, match="zip"):
        serve.differing([[1]], [[1, 2]])


STOCK = {"backends": ["FLASH_ATTN"], "classes": ["vllm.flash_attn.FlashAttentionImpl"]}
NONE = {"implementation": "", "forwards": 0}
OURS = {"backends": ["CUSTOM"], "classes": ["vllm_kda_plugin.attention.flash.Impl"]}
RAN = {"implementation": "vllm_kda_plugin.attention.flash.Impl", "forwards": 4}


@pytest.mark.parametrize(
    ("backend", "attention"),
    [
        ("FLASH_ATTN", {**STOCK, "stats": NONE}),
        ("CUSTOM", {**OURS, "stats": RAN}),
        ("GATHER_FLASH_ATTN", {**OURS, "stats": RAN}),
        ("CUSTOM", {"backends": ["CUSTOM", "MLA"], "classes": [*OURS["classes"], "vllm.MLAImpl"], "stats": RAN}),
    ],
)
def test_what_ran_is_what_was_asked_for(backend: str, attention: dict[str, Any]) -> None:
    assert engine(backend, attention).attention() == attention


@pytest.mark.parametrize(
    ("backend", "attention"),
    [
        ("CUSTOM", {**STOCK, "stats": NONE}),
        ("CUSTOM", {**OURS, "stats": NONE}),
        ("FLASH_ATTN", {**OURS, "stats": RAN}),
        ("FLASHINFER", {**STOCK, "stats": NONE}),
    ],
)
def test_another_backend_than_asked_for_is_an_error(backend: str, attention: dict[str, Any]) -> None:
    with pytest.raises(BenchError, match=f"{backend} was asked for, but vLLM ran vllm"):
        engine(backend, attention).attention()


def report(differ_at: Sequence[int] = ()) -> dict[str, Any]:
    return {
        "machine": {"device": "a GPU"},
        "settings": {"enforce_eager": False},
        "load": dataclasses.asdict(LOAD),
        "engines": [
            {"backend": "CUSTOM", **OURS, "stats": {**RAN, "gather_calls": 1234}},
            {"backend": "FLASH_ATTN", **STOCK, "stats": NONE},
        ],
        "first_token": [
            {"prompt_tokens": 30000, **serve.compare([[0.5, 0.4], [0.6, 0.6]], "s", smaller_is_faster=True)}
        ],
        "decode": serve.compare([[990.0, 1010.0], [1000.0, 1000.0]], "tokens_per_s", smaller_is_faster=False),
        "tokens": {
            "first": {"prompts": 2, "distinct": 2, "differ_at": []},
            "decoded": {"prompts": 6, "distinct": 9, "differ_at": list(differ_at)},
        },
    }


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    serve.show(report())
    said = capsys.readouterr().out
    assert "first token of a prompt of 30,000" in said
    assert "450.0 ms, 66,667 tokens/s" in said
    assert "1.333x" in said
    assert "1.200 to 1.500" in said
    assert "1.000x" in said
    assert "0.990 to 1.010" in said
    assert "CUSTOM ran vllm_kda_plugin.attention.flash.Impl: forwards 4, gather calls 1,234" in said
    assert "FLASH_ATTN ran vllm.flash_attn.FlashAttentionImpl\n" in said
    assert "First tokens of 2 prompts, 2 distinct ones: the same in both" in said
    assert "5 decoded tokens of 6 prompts, 9 distinct ones: the same in both" in said
    serve.show(report([7, 3]))
    said = capsys.readouterr().out
    assert "9 distinct ones: different for 2, from token 7, 3 on" in said
    assert "Compare with --eager." in said


def test_plot(tmp_path: Path) -> None:
    file = tmp_path / "serve.png"
    serve_plot.save(report(), file)
    assert imread(file).std() > 0.05


def test_settings_of_the_engines(tmp_path: Path) -> None:
    large, randomize = serve.engine_settings(None, tmp_path, serve.GPU_LOAD, False, on_cpu=False)
    assert randomize
    assert large["load_format"] == "dummy"
    assert large["max_model_len"] == 131073
    assert large["max_num_batched_tokens"] == 8192
    assert not large["enforce_eager"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]
    given, randomize = serve.engine_settings("some/model", tmp_path, LOAD, True, on_cpu=False)
    assert not randomize
    assert given["model"] == "some/model"
    assert given["max_model_len"] == 51
    assert given["enforce_eager"]
    assert "load_format" not in given


def test_config_alone(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(write_config(tmp_path / "model", hidden_size=512))
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.num_hidden_layers) == (512, 4)
    assert "bfloat16" in str(config.dtype)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    prepare_environment(offline=False)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "HF_HUB_OFFLINE" not in os.environ
    prepare_environment(offline=True)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_command_passes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run(**options: Any) -> int:
        given.update(options)
        return 5

    monkeypatch.setattr(serve, "run", run)
    assert cli.main(["bench", "serve"]) == 5
    unset = ("model", "backends", "prompt_tokens", "chunk", "json", "plot")
    assert given == {**dict.fromkeys(unset), "eager": False}
    options = ["--model", "m", "--backends", "A", "B", "--prompt-tokens", "5", "6", "--chunk", "7", "--eager"]
    assert cli.main(["bench", "serve", *options, "--plot", "a.svg"]) == 5
    wanted = {"model": "m", "backends": ["A", "B"], "prompt_tokens": [5, 6], "chunk": 7}
    assert given == {**wanted, "eager": True, "json": None, "plot": Path("a.svg")}
