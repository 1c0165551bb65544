"""Every test here drives the real vLLM engine on the CPU platform."""

from __future__ import annotations

import logging
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

# Read when vLLM is imported: the engine in this process, no network, no usage report.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import pytest

from vllm_kda_plugin.tiny_model import write_model

# vLLM's handlers hold a stream that pytest has closed when the statistics are logged at exit.
logging.raiseExceptions = False

ModelFactory = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        skip = pytest.mark.skip(reason="these tests drive vLLM's CPU platform; tests/gpu drive CUDA")
        for item in items:
            if pathlib.Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _a_second_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """When vLLM's CPU engine starts it looks through every module, and one that K3's layer has imported breaks that."""
    monkeypatch.delitem(sys.modules, "llvmlite.binding.ffi", raising=False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """Writes a small model, once for each set of arguments of ``write_model``; gives its folder."""
    root = tmp_path_factory.mktemp("models")
    written: dict[str, str] = {}

    def make(model_type: str = "llama", **config: Any) -> str:
        key = f"{model_type} {sorted(config.items())}"
        if key not in written:
            written[key] = str(write_model(root / str(len(written)), model_type, **config))
        return written[key]

    return make
