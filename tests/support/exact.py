"""fp8 numbers times a scale in exact arithmetic, rounded once: half to even, as IEEE 754 has it."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.float16, torch.bfloat16)
_FP8_MANTISSA_AND_BIAS = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}
_MANTISSA_AND_BIAS = {torch.float16: (10, 15), torch.bfloat16: (7, 127)}
NAN = 0x7FFF  # which NaN is nobody's business, see without_nan_payloads()


def fp8_number(code: int, fp8: torch.dtype) -> Fraction | float:
    """The number that a byte encodes; a float only for infinities and NaN."""
    mantissa_bits, bias = _FP8_MANTISSA_AND_BIAS[fp8]
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = divmod(code & 0x7F, 1 << mantissa_bits)
    if fp8 == torch.float8_e4m3fn and code & 0x7F == 0x7F:
        return math.nan
    if fp8 == torch.float8_e5m2 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent:
        mantissa += 1 << mantissa_bits
    return sign * mantissa * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)


def nearest_bits(magnitude: Fraction, wide: torch.dtype) -> int:
    """The bits of the number of ``wide`` nearest to a positive one; a tie goes to the even one."""
    mantissa_bits, bias = _MANTISSA_AND_BIAS[wide]
    infinity = (2 * bias + 1) << mantissa_bits
    if magnitude == 0:
        return 0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, 1 - bias)
    units = round(magnitude / Fraction(2) ** (exponent - mantissa_bits))  # of a Fraction: half to even
    return min(((exponent + bias - 1) << mantissa_bits) + units, infinity)


def product_bits(code: int, fp8: torch.dtype, scale: float, wide: torch.dtype) -> int:
    """The bits of an fp8 number times a finite scale, rounded once to ``wide``; NAN for every NaN."""
    number = fp8_number(code, fp8)
    sign = 0x8000 if (code >= 0x80) != (math.copysign(1, scale) < 0) else 0
    if isinstance(number, Fraction):
        return sign | nearest_bits(abs(number * Fraction(scale)), wide)
    if math.isnan(number) or scale == 0:
        return NAN
    mantissa_bits, bias = _MANTISSA_AND_BIAS[wide]
    return sign | (2 * bias + 1) << mantissa_bits


def product_table(fp8: torch.dtype, scale: float, wide: torch.dtype) -> torch.Tensor:
    """int16 ``[256]``: :func:`product_bits` of every byte."""
    return _product_table(fp8, scale.hex(), wide)


@functools.lru_cache(maxsize=512)
def _product_table(fp8: torch.dtype, scale: str, wide: torch.dtype) -> torch.Tensor:  # by digits: 0.0 equals -0.0
    bits = torch.tensor([product_bits(code, fp8, float.fromhex(scale), wide) for code in range(256)])
    return bits.where(bits < 0x8000, bits - 0x10000).to(torch.int16)


def without_nan_payloads(bits: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """int16 bits with every NaN turned into NAN: processors differ in which one they give."""
    return torch.where(bits.view(wide).isnan(), NAN, bits)
