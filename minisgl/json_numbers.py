"""Sets of numbers as languages of decimal texts.

A bound is a walk over its digits. "At least 237" with three digits:

    2 -> 3 -> [7-9]             as long as the digits are equal, the next one decides
         [4-9] [0-9]
    [3-9] [0-9]{2}              once one is larger, the rest is free

and numbers with more digits are larger whatever they are. Fractions compare the same way after the point.
Divisibility is a counter: reading a digit takes the remainder r to (10 r + digit) mod m.

So that the texts mean the same after parsing to float64, fractions under a bound have at most 15 digits in all.
"""

from __future__ import annotations

import math
from fractions import Fraction

from .expressions import Algebra, Arms, Node, UnsupportedGrammar
from .json_values import Number

_DIGITS = [1 << (0x30 + digit) for digit in range(10)]
MAX_DIGITS = 400  # of a bound
MAX_DIVISOR = 10**9
MAX_BOUNDED_DIVISOR = 10**4  # below an upper bound, where remainders and digits multiply
MAX_LISTED = 2000  # so few multiples are simply listed
DIGITS = "digits"  # the "encoding" whose any-text is [0-9]*
EXACT_DIGITS = 15  # decimal digits that survive a round trip through float64


class Residue(Node):
    """Digit strings that continue a number with remainder `rest` (mod `modulus`) to a multiple of it."""

    __slots__ = ("modulus", "rest")

    def __init__(self, modulus: int, rest: int):
        super().__init__(rest == 0, DIGITS)
        self.modulus, self.rest = modulus, rest

    def derive(self, algebra: Algebra) -> Arms:
        arms: dict[Node, int] = {}
        for digit in range(10):
            after = _residue(algebra, self.modulus, (self.rest * 10 + digit) % self.modulus)
            arms[after] = arms.get(after, 0) | _DIGITS[digit]
        return tuple((bits, node) for node, bits in arms.items())


def _residue(algebra: Algebra, modulus: int, rest: int) -> Node:
    return algebra.intern(("residue", modulus, rest), lambda: Residue(modulus, rest))


def number_language(algebra: Algebra, number: Number) -> Node:
    """The texts of a set of numbers; EMPTY when there is none. Raises GrammarError for what isn't supported."""
    return _Numbers(algebra).language(number)


class _Numbers:
    def __init__(self, algebra: Algebra):
        self.algebra = algebra
        self.digit = self.between(0, 9)
        self.minus = algebra.literal(b"-")
        # whatever the remainder, more digits can mend it: no search is needed where digits are free
        algebra.set_universe(DIGITS, self.digits(0))

    def between(self, low: int, high: int) -> Node:
        """One digit from `low` to `high`."""
        return self.algebra.byte_set(sum(_DIGITS[low : high + 1]))

    def digits(self, low: int, high: int | None = None) -> Node:
        return self.algebra.repeat(self.digit, low, high)

    def language(self, number: Number) -> Node:
        if number.listed is not None:
            fitting = (text.encode() for value, text in number.listed if number.has(value))
            return self.algebra.words(fitting)
        for bound in (number.low, number.high):
            if bound is not None and len(str(int(bound))) + len(_fraction_digits(bound)) > MAX_DIGITS:
                raise UnsupportedGrammar("json_schema: minimum or maximum with that many digits is not supported")
        integers = self.integers(number) if number.integer is not False else self.algebra.EMPTY
        whole_only = any(divisor.denominator == 1 and sign for divisor, sign in number.multiples)
        if number.integer is True or whole_only:
            return integers
        if number.multiples:
            raise UnsupportedGrammar("json_schema: multipleOf for numbers that aren't integers is not supported")
        if number.integer is None and number.low is None and number.high is None:
            return self.any_number()
        return self.algebra.alt([integers, self.decimals(number)])

    # ---- integers

    def integers(self, number: Number) -> Node:
        low = None if number.low is None else math.ceil(number.low)
        if low is not None and number.low_open and low == number.low:
            low += 1
        high = None if number.high is None else math.floor(number.high)
        if high is not None and number.high_open and high == number.high:
            high -= 1
        if number.multiples and low is not None and high is not None:
            step = max((divisor.numerator for divisor, sign in number.multiples if sign), default=1)
            if (high - low) // step <= MAX_LISTED:
                fitting = range(low + -low % step, high + 1, step)
                return self.algebra.words(str(n).encode() for n in fitting if number.has(Fraction(n)))
        found = self.signed(low, high)
        for divisor, sign in sorted(number.multiples):
            # an integer is a multiple of p/q (in lowest terms) exactly when p divides it
            modulus = divisor.numerator
            limit = MAX_DIVISOR if (low is None or low <= 0) and high is None else MAX_BOUNDED_DIVISOR
            if modulus > limit:
                raise UnsupportedGrammar(f"json_schema: multipleOf above {limit} is not supported here")
            optional_minus = self.algebra.repeat(self.minus, 0, 1)
            multiple = self.algebra.concat(optional_minus, _residue(self.algebra, modulus, 0))
            found = self.algebra.both(found, multiple) if sign else self.algebra.without(found, multiple)
        return found

    def signed(self, low: int | None, high: int | None) -> Node:
        """Integers from `low` to `high`; "-0" only where nothing is bounded."""
        if low is None and high is None:
            return self.algebra.concat(self.algebra.repeat(self.minus, 0, 1), self.natural(0, None))
        parts = []
        if high is None or high >= 0:
            parts.append(self.natural(max(low or 0, 0) if low is not None else 0, high))
        if low is None or low < 0:
            nearest = 1 if high is None or high >= 0 else -high
            parts.append(self.algebra.concat(self.minus, self.natural(nearest, None if low is None else -low)))
        return self.algebra.alt(parts)

    def natural(self, low: int, high: int | None) -> Node:
        """Non-negative integers from `low` to `high`, without leading zeros."""
        if high is not None and low > high:
            return self.algebra.EMPTY
        shortest, longest = len(str(low)), None if high is None else len(str(high))
        if longest == shortest:
            return self.same_length(str(low), str(high))
        parts = [self.same_length(str(low), "9" * shortest)]
        if longest is None or longest - shortest > 1:
            more = self.digits(shortest, None if longest is None else longest - 2)
            parts.append(self.algebra.concat(self.between(1, 9), more))
        if longest is not None:
            parts.append(self.same_length("1" + "0" * (longest - 1), str(high)))
        return self.algebra.alt(parts)

    def same_length(self, low: str, high: str) -> Node:
        """Digit strings of one length from `low` to `high`."""
        if not low:
            return self.algebra.EPSILON
        if set(low) == {"0"} and set(high) == {"9"}:
            return self.digits(len(low), len(low))
        first, last, rest = int(low[0]), int(high[0]), len(low) - 1
        if first == last:
            return self.algebra.concat(self.between(first, first), self.same_length(low[1:], high[1:]))
        parts = [
            self.algebra.concat(self.between(first, first), self.same_length(low[1:], "9" * rest)),
            self.algebra.concat(self.between(last, last), self.same_length("0" * rest, high[1:])),
        ]
        if last - first > 1:
            parts.append(self.algebra.concat(self.between(first + 1, last - 1), self.digits(rest, rest)))
        return self.algebra.alt(parts)

    # ---- numbers with a fraction

    def any_number(self) -> Node:
        algebra = self.algebra
        fraction = algebra.concat(algebra.literal(b"."), self.digits(1))
        sign = algebra.byte_set(1 << ord("+") | 1 << ord("-"))
        # up to e+-299: larger ones overflow float64 to infinity
        power = algebra.alt([self.digits(1, 2), algebra.concat(self.between(1, 2), self.digits(2, 2))])
        exponent = algebra.concat(algebra.byte_set(1 << ord("e") | 1 << ord("E")), algebra.repeat(sign, 0, 1), power)
        return algebra.concat(self.signed(None, None), algebra.repeat(fraction, 0, 1), algebra.repeat(exponent, 0, 1))

    def decimals(self, number: Number) -> Node:
        """Numbers with a decimal point within the bounds; when integer is False, whose value isn't whole."""
        algebra, zero = self.algebra, Fraction(0)
        point = algebra.literal(b".")
        some = algebra.concat(self.digits(0), self.between(1, 9), self.digits(0))
        shape = algebra.concat(self.natural(0, None), point, some if number.integer is False else self.digits(1))
        digits = algebra.byte_set(sum(_DIGITS) | 1 << ord("."))
        shape = algebra.both(shape, algebra.repeat(digits, 1, EXACT_DIGITS + 1))
        low, low_open, high, high_open = number.low, number.low_open, number.high, number.high_open
        parts = []
        if high is None or high > 0 or (high == 0 and not high_open):
            sides = [shape]
            if low is not None and (low > 0 or (low == 0 and low_open)):
                sides.append(self.at_least(low, low_open))
            if high is not None:
                sides.append(self.at_most(high, high_open))
            parts.append(algebra.both(*sides))
        if low is None or low < 0:
            sides = [shape, self.at_least(zero, True)]
            if high is not None and high <= 0:
                sides.append(self.at_least(-high, high_open))
            if low is not None:
                sides.append(self.at_most(-low, low_open))
            parts.append(algebra.concat(self.minus, algebra.both(*sides)))
        return algebra.alt(parts)

    def at_least(self, bound: Fraction, is_open: bool) -> Node:
        """Unsigned decimals with a point that are >= (or >) a bound >= 0."""
        algebra, whole = self.algebra, int(bound)
        point = algebra.literal(b".")
        above = algebra.concat(self.natural(whole + 1, None), point, self.digits(1))
        equal = algebra.concat(algebra.literal(f"{whole}.".encode()), self.fraction_above(bound, is_open))
        return algebra.alt([above, equal])

    def at_most(self, bound: Fraction, is_open: bool) -> Node:
        algebra, whole = self.algebra, int(bound)
        point = algebra.literal(b".")
        below = algebra.concat(self.natural(0, whole - 1), point, self.digits(1))
        equal = algebra.concat(algebra.literal(f"{whole}.".encode()), self.fraction_below(bound, is_open))
        return algebra.alt([below, equal])

    def fraction_above(self, bound: Fraction, is_open: bool) -> Node:
        """Digits after the point, at least one, that make a fraction >= (or >) the bound's."""
        algebra, found = self.algebra, self.digits(0)
        if is_open:
            found = algebra.concat(self.digits(0), self.between(1, 9), self.digits(0))
        for digit in reversed(_fraction_digits(bound)):
            equal = algebra.concat(self.between(int(digit), int(digit)), found)
            larger = [] if digit == "9" else [algebra.concat(self.between(int(digit) + 1, 9), self.digits(0))]
            found = algebra.alt([equal, *larger])
        return algebra.both(found, self.digits(1))

    def fraction_below(self, bound: Fraction, is_open: bool) -> Node:
        """Digits after the point, at least one, that make a fraction <= (or <) the bound's."""
        algebra = self.algebra
        found = algebra.EMPTY if is_open else algebra.repeat(self.between(0, 0), 0, None)
        for digit in reversed(_fraction_digits(bound)):
            equal = algebra.concat(self.between(int(digit), int(digit)), found)
            smaller = [] if digit == "0" else [algebra.concat(self.between(0, int(digit) - 1), self.digits(0))]
            found = algebra.alt([algebra.EPSILON, equal, *smaller])
        return algebra.both(found, self.digits(1))


def _fraction_digits(bound: Fraction) -> str:
    """The decimal digits after the point, without trailing zeros ("" for integers)."""
    digits, rest = [], abs(bound) - int(abs(bound))
    while rest and len(digits) <= MAX_DIGITS:
        rest *= 10
        digits.append(str(int(rest)))
        rest -= int(rest)
    return "".join(digits)
