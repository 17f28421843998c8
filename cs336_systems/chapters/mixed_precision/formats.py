"""Floating-point formats in exact arithmetic: what rounding does to a number and to a sum, without a float on the way.

A format with p fraction bits and e exponent bits holds ±2^k · (1 + f/2^p), k from 2 - 2^(e-1) to 2^(e-1) - 1, and below
the smallest such number the multiples of its smallest step (subnormal numbers). Every operation rounds its exact
result to the nearest number of the format, and where two are equally near, to the one whose last bit is 0 (IEEE 754).

Numbers go in as `fractions.Fraction`, int or float (a float stands for exactly what it holds: for a hundredth write
`Fraction(1, 100)`), and come out as `Fraction`, or as ±`math.inf` where they are too large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | int | float


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    name: str
    exponent_bits: int
    fraction_bits: int

    @property
    def largest_exponent(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def smallest_exponent(self) -> int:
        """Of a normal number."""
        return 1 - self.largest_exponent

    @property
    def epsilon(self) -> Fraction:
        """From 1 to the next larger number."""
        return Fraction(1, 2**self.fraction_bits)

    @property
    def largest(self) -> Fraction:
        return (2 - self.epsilon) * Fraction(2) ** self.largest_exponent

    def ulp(self, x: Number) -> Fraction:
        """The distance between neighbors in the format around x ("unit in the last place"); x finite."""
        exponent = max(_exponent(Fraction(x)), self.smallest_exponent) if x else self.smallest_exponent
        return self.epsilon * Fraction(2) ** exponent

    def round(self, x: Number) -> Fraction | float:
        """The number of the format nearest to x; ±`math.inf` from half a step above the largest one on."""
        if isinstance(x, float) and math.isinf(x):
            return x
        x = Fraction(x)
        step = self.ulp(x)
        rounded = round(x / step) * step  # Python's round takes the even one of two equally near
        if abs(rounded) > self.largest:
            return math.inf if x > 0 else -math.inf
        return rounded


FORMATS = {
    format.name: format
    for format in (
        Format("fp64", 11, 52),
        Format("fp32", 8, 23),
        Format("tf32", 8, 10),  # an operand of a tensor core; it is stored, and summed up, as fp32
        Format("fp16", 5, 10),
        Format("bf16", 8, 7),
    )
}


def number_format(name: str) -> Format:
    """The format with this name. ValueError for an unknown one, naming the known ones."""
    if name not in FORMATS:
        raise ValueError(f"unknown number format {name!r}; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]


def running_sums(accumulator: Format, addend: Number, additions: int) -> list[Fraction | float]:
    """The sum after 0, 1, … `additions` times `sum = accumulator.round(sum + addend)`, from 0 on.

    Hardware that adds two numbers of a 16-bit format in fp32 and rounds the result gets the same: fp32's 24 significant
    bits are at least 2p + 2 of p = 11 (fp16) or 8 (bf16), with which rounding twice changes nothing (Figueroa, "When is
    double rounding innocuous?", SIGNUM Newsletter 30, 1995).
    """
    sums: list[Fraction | float] = [Fraction(0)]
    for _ in range(additions):
        sums.append(accumulator.round(sums[-1] + addend))
    return sums


def stagnation(accumulator: Format, addend: Number) -> Fraction:
    """The power of two from which on half an ulp exceeds the addend: a sum that reaches it stays there.

    In the last binade before, half an ulp may equal the addend; a sum with an even last bit then stays already. For an
    addend far above the format's resolution the power may lie beyond `largest`. ValueError unless addend > 0.
    """
    if not addend > 0:
        raise ValueError(f"addend={addend}; it must be positive")
    return Fraction(2) ** (_exponent(2 * Fraction(addend) / accumulator.epsilon) + 1)


def _exponent(x: Fraction) -> int:
    """k with 2^k <= |x| < 2^(k+1); x is not 0."""
    x = abs(x)
    k = x.numerator.bit_length() - x.denominator.bit_length()
    return k if x >= Fraction(2) ** k else k - 1
