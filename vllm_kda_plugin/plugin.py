"""The ``vllm.general_plugins`` entry point: tells vLLM, in each of its processes, what it gets from us."""

from __future__ import annotations

import logging

# vLLM configures only loggers under its own name.
logger = logging.getLogger("vllm.kda_plugin")


def register() -> None:
    """Register the backend names with vLLM, teach the platform's selector about them, replace the KDA layers.

    Called by vLLM in every process, possibly more than once; a second call changes nothing. Never
    raises: without a usable vLLM it logs what is missing and leaves everything as it was.
    """
    try:
        from vllm_kda_plugin.platforms import kda, registry, selector

        registry.register_names()
        selector.install()
        kda.install()
    except Exception as error:  # whatever escapes from here ends vLLM
        logger.warning(
            "vllm-kda-plugin is inactive, stock backends are used: this vLLM lacks what it needs (%s: %s). "
            "Run 'vllm-kda doctor'.",
            type(error).__name__,
            error,
        )
