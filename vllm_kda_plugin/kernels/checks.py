"""What a refused argument is told, and whether to look for more on the GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

CHECK_VARIABLE = "VLLM_KDA_CHECK"


def refused(name: str, found: str, allowed: str) -> ValueError:
    """The error for an argument: its name, what was found, what is allowed."""
    return ValueError(f"{name} {found}, must be {allowed}")


def debug_checks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether VLLM_KDA_CHECK=1 asks to check on the GPU what kernels read as indices, at the cost of a synchronisation.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = environ.get(CHECK_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{CHECK_VARIABLE} = {value!r} is not allowed; allowed is 0 or 1")
    return value == "1"
