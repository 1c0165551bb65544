"""Names, selection and settings, as vLLM's own processes see them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.engine.conftest import ModelFactory
from tests.support.engine import prompts, run

STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"


@pytest.fixture(autouse=True)
def registered() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def python(code: str, **env: str) -> str:
    """What ``code`` prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def layer(**settings: Any) -> Any:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    return AttentionSelectorConfig(
        **{"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": None, **settings}
    )


def select(name: str | None, config: Any) -> str:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return str(current_platform.get_attn_backend_cls(AttentionBackendEnum[name] if name else None, config))


def test_register_twice_changes_nothing() -> None:
    python(
        """
import vllm.v1.attention.backends.registry as registry
from vllm.platforms import current_platform
from vllm_kda_plugin.plugin import register

def state():
    members = list(registry.AttentionBackendEnum.__members__)
    return dict(registry._ATTN_OVERRIDES), members, type(current_platform).get_attn_backend_cls

before = state()
register()
once = state()
register()
assert before != once == state()
"""
    )


def test_selection() -> None:
    ours = "vllm_kda_plugin.attention.backend.GatherTorchBackend"
    stock = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert select("CUSTOM", layer()) == ours
    assert select("GATHER_FLASH_ATTN", layer()) == ours
    assert select(None, layer()) == stock
    assert select("CPU_ATTN", layer()) == stock
    assert select("FLASH_ATTN", layer()) == stock  # as without the plugin


def test_unsupported_layer_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"CUSTOM is not valid for this configuration.*kv_cache_dtype not supported"):
        select("CUSTOM", layer(kv_cache_dtype="fp8"))


def test_mla_layers_take_the_platforms_own_choice() -> None:
    mla = layer(use_mla=True, head_size=576)
    assert select("CUSTOM", mla) == select(None, mla)


def test_unknown_name_lists_ours() -> None:
    with pytest.raises(ValueError, match=r"Unknown attention backend: 'NO_SUCH'.*CUSTOM, GATHER_FLASH_ATTN"):
        select("NO_SUCH", layer())


def test_name_survives_a_process_that_has_not_loaded_plugins() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    pickled = pickle.dumps(AttentionBackendEnum["GATHER_FLASH_ATTN"])
    out = python(
        f"""
import pickle
member = pickle.loads({pickled!r})
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert member is AttentionBackendEnum["GATHER_FLASH_ATTN"]
load_general_plugins()
assert member is AttentionBackendEnum["GATHER_FLASH_ATTN"]
print(member.get_path())
"""
    )
    assert out.splitlines()[-1] == "vllm_kda_plugin.attention.backend.GatherTorchBackend"


def test_without_the_plugin_vllm_is_stock() -> None:
    """VLLM_PLUGINS="" hides the plugin, and so does uninstalling it: nothing of it is left in vLLM's modules."""
    code = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert not AttentionBackendEnum.CUSTOM.is_overridden()
assert "GATHER_FLASH_ATTN" not in AttentionBackendEnum.__members__
assert current_platform.get_attn_backend_cls.__module__ == type(current_platform).__module__
assert not any(name.startswith("vllm_kda_plugin") for name in sys.modules)
assert not hasattr(current_platform.get_attn_backend_cls, "__wrapped__")
print("stock")
"""
    assert python(code, VLLM_PLUGINS="").splitlines()[-1] == "stock"


def test_stock_backend_still_runs_beside_the_plugin(model: ModelFactory) -> None:
    stock = run(model(), prompts(2, 50), backend=None, max_tokens=8)
    assert stock.implementations == {STOCK}
    assert stock.gathers == 0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"gather_workspace": 1}, r"kda_plugin.gather_workspace is no setting .*kda_plugin.gather_workspace_mib"),
        (
            {"gather_workspace_mib": "big"},
            r"kda_plugin.gather_workspace_mib = 'big' is not allowed; allowed is a whole number from 1",
        ),
        (
            {"gather_workspace_mib": 0},
            r"kda_plugin.gather_workspace_mib = 0 is not allowed; allowed is a whole number",
        ),
        ({"log_stats": "yes"}, r"kda_plugin.log_stats = 'yes' is not allowed; allowed is true or false"),
        (7, r"kda_plugin in --additional-config must be an object"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_setting_ends_the_start(model: ModelFactory, section: Any, message: str) -> None:
    """In the process that reads the command line, before a model is loaded, also if the backend is not ours."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model(), additional_config={"kda_plugin": section}, max_model_len=128)
    with pytest.raises(ValueError, match=message):
        arguments.create_engine_config()


def test_wrong_variable_ends_the_start(model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setenv("VLLM_KDA_LOG_STATS", "perhaps")
    with pytest.raises(ValueError, match="VLLM_KDA_LOG_STATS = 'perhaps' is not allowed"):
        EngineArgs(model(), max_model_len=128).create_engine_config()
