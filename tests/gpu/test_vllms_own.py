"""vLLM's public tests of attention backends, with ours beside FLASH_ATTN in their lists.

They are no part of the vLLM wheel: unpack the source distribution and name the folder in ``VLLM_SOURCE``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.config")

FILES = ("tests/v1/attention/test_attention_backends.py", "tests/v1/attention/utils.py")
ROOT = Path(__file__).resolve().parents[2]
# What the tests read of the models they name, so that nothing is downloaded.
MODELS = {
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    "microsoft/Phi-tiny-MoE-instruct": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 2048,
        "intermediate_size": 448,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "vocab_size": 32064,
        "torch_dtype": "bfloat16",
    },
}
CONFTEST = """
import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

load_general_plugins()


@pytest.fixture
def default_vllm_config():
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def pytest_collection_finish(session):
    module = session.items[0].module
    for name in ("BACKENDS_TO_TEST", "SLIDING_WINDOW_BACKENDS_TO_TEST", "NON_CAUSAL_BACKENDS_TO_TEST"):
        # Others than these two would be compiled for minutes, and nothing is compared with them.
        getattr(module, name)[:] = [AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CUSTOM]
    module.is_torch_equal_or_newer = lambda _: False  # no second run for FlexAttention


def pytest_terminal_summary(terminalreporter):
    from vllm_kda_plugin.attention.stats import STATS

    terminalreporter.write_line(f"fresh={STATS.fresh_calls} gather={STATS.gather_calls} paged={STATS.paged_calls}")
"""


@pytest.mark.gpu
def test_vllms_own_tests_pass_with_our_backend(tmp_path: Path) -> None:
    source = os.environ.get("VLLM_SOURCE")
    if not source:
        pytest.skip("VLLM_SOURCE does not name a folder of vLLM's source distribution")
    for name in FILES:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((Path(source) / name).read_text())
    for model, config in MODELS.items():
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text(json.dumps(config))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FILES[0]]
    command += ["-k", "causal_backend_correctness or (sliding_window_backend_correctness and not rocm)"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, sys.path)]),
        "VLLM_KDA_GATHER": "always",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counted = re.search(r"fresh=(\d+) gather=(\d+) paged=(\d+)", done.stdout)
    assert counted is not None
    assert int(counted[2]) > 100, counted[0]
    print(done.stdout[-300:])
