"""Settings: where they come from, and what is said when they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_kda_plugin.config import PluginConfig
from vllm_kda_plugin.kernels.checks import debug_checks


def test_defaults() -> None:
    assert PluginConfig.load({}, {}) == PluginConfig(gather_workspace_mib=256, log_stats=False, prefill="auto")


def test_section_wins_over_environment() -> None:
    environment = {"VLLM_KDA_GATHER_WORKSPACE_MIB": "64", "VLLM_KDA_LOG_STATS": "1", "VLLM_KDA_ARCHS": "90a"}
    assert PluginConfig.load({"gather_workspace_mib": 32}, environment) == PluginConfig(
        gather_workspace_mib=32, log_stats=True
    )
    assert PluginConfig.load({"log_stats": False}, environment) == PluginConfig(
        gather_workspace_mib=64, log_stats=False
    )


def test_every_wrong_key_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"kda_plugin.log_stats = 3 is not allowed; allowed is true or false; kda_plugin.speed is no setting",
    ):
        PluginConfig.load({"speed": 11, "log_stats": 3}, {})


@pytest.mark.parametrize("prefill", ["auto", "native", "flashkda", "triton", "torch"])
def test_prefill(prefill: str) -> None:
    assert PluginConfig.load({"prefill": prefill}, {}).prefill == prefill
    assert PluginConfig.load({}, {"VLLM_KDA_PREFILL": prefill}).prefill == prefill


@pytest.mark.parametrize("prefill", ["fast", "Torch", "", 1])
def test_wrong_prefill_is_refused(prefill: Any) -> None:
    message = r"^kda_plugin.prefill = .* is not allowed; allowed is auto, native, flashkda, triton or torch$"
    with pytest.raises(ValueError, match=message):
        PluginConfig.load({"prefill": prefill}, {})


def test_unknown_variable_is_named() -> None:
    with pytest.raises(ValueError, match=r"VLLM_KDA_SPEED is no setting.*VLLM_KDA_GATHER_WORKSPACE_MIB"):
        PluginConfig.load({}, {"VLLM_KDA_SPEED": "11"})


def test_every_setting_says_what_is_allowed() -> None:
    for name in PluginConfig.model_fields:
        with pytest.raises(ValueError, match=f"kda_plugin.{name} = None is not allowed; allowed is "):
            PluginConfig.load({name: None}, {})


@pytest.mark.parametrize(
    ("environment", "wanted"), [({}, False), ({"VLLM_KDA_CHECK": "0"}, False), ({"VLLM_KDA_CHECK": "1"}, True)]
)
def test_debug_mode_is_no_setting_of_an_engine(environment: dict[str, str], wanted: bool) -> None:
    assert debug_checks(environment) is wanted
    assert PluginConfig.load({}, environment) == PluginConfig()


@pytest.mark.parametrize("value", ["", "2", "true", "yes", " 1"])
def test_wrong_debug_mode_is_named(value: str) -> None:
    for read in (debug_checks, lambda environment: PluginConfig.load({}, environment)):
        with pytest.raises(ValueError, match=f"^VLLM_KDA_CHECK = '{value}' is not allowed; allowed is 0 or 1$"):
            read({"VLLM_KDA_CHECK": value})


def test_debug_mode_is_read_from_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KDA_CHECK", "1")
    assert debug_checks()
    monkeypatch.delenv("VLLM_KDA_CHECK")
    assert not debug_checks()
