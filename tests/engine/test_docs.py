"""What docs/operating.md quotes of the log, where vLLM is needed to make it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from vllm import logger

from vllm_kda_plugin.attention.flash_metadata import log_choice
from vllm_kda_plugin.attention.planner import H200, Layer, Planner

OPERATING = Path(__file__).resolve().parents[2] / "docs" / "operating.md"


def test_what_is_said_of_attention_is_what_a_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Logger:
        def info_once(self, text: str, *words: str) -> None:
            said.append(text % words)

    monkeypatch.setattr(logger, "init_logger", lambda name: Logger())
    layer = Layer(32, 8, 128, 16)
    fp8 = dataclasses.replace(layer, fp8=True)
    rates = (*H200.rates, *(dataclasses.replace(rate, cache="fp8") for rate in H200.rates))
    for planner in (
        Planner(layer, "auto", H200, 1 << 28),
        Planner(layer, "always", H200, 1 << 28),
        Planner(fp8, "auto", dataclasses.replace(H200, rates=rates), 1 << 28),
        Planner(dataclasses.replace(fp8, must_gather=True), "auto", None, 1 << 28),
        Planner(dataclasses.replace(layer, page_size=128), "never", H200, 1 << 28),
        Planner(layer, "auto", None, 1 << 28),
    ):
        log_choice(planner)
    assert re.findall(r"^Attention of .+$", OPERATING.read_text(encoding="utf-8"), re.MULTILINE) == said
