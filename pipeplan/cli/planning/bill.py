"""How many days does the whole training take, and what does it cost? Beside the period of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import click

from ...errors import BadInput
from ...names import shown

Command = TypeVar("Command", bound=Callable[..., Any])
MOST = 10**18  # samples, tokens, dollars
NUMBER = re.compile(r"[0-9]{1,19}(\.[0-9]{1,18})?([eE]\+?[0-9]{1,2})?")


def bill_options(command: Command) -> Command:
    """Add --samples, --tokens and --price, which :meth:`Bill.of` reads."""
    for name, metavar, text in (
        ("--price", "DOLLARS", "What a GPU costs an hour, such as 2.5; prints the cost of the training."),
        ("--tokens", "N/LENGTH", "Tokens to train on and those of a sample, such as 15e12/8192, for --samples."),
        ("--samples", "N", "Samples to train on, such as 100e6; prints the training time in days."),
    ):
        command = click.option(name, metavar=metavar, help=text)(command)
    return command


@dataclass(frozen=True, slots=True)
class Bill:
    """A training of so many ``samples``, where a GPU costs ``price`` dollars an hour (None: nobody says)."""

    samples: int
    price: Fraction | None

    @staticmethod
    def of(samples: str | None, tokens: str | None, price: str | None) -> Bill | None:
        """Return what the options ask for, None where that is nothing; BadInput for what they don't say."""
        if samples is not None and tokens is not None:
            raise BadInput("--samples and --tokens both say how long the training is; say one of them")
        if samples is None and tokens is None:
            if price is not None:
                raise BadInput("--price: say how long the training is, by --samples or --tokens")
            return None
        if tokens is None:
            count = _whole("--samples", samples or "")
        else:
            whole, _, each = tokens.partition("/")
            if not each:
                raise BadInput(
                    f"--tokens: '{shown(tokens, 40)}' doesn't say how many tokens a sample has, such as 15e12/8192"
                )
            count = -(-_whole("--tokens", whole) // _whole("--tokens", each))
        return Bill(count, None if price is None else _number("--price", price, whole=False))

    def days(self, samples_per_second: float) -> float:
        """Return the days that the training takes."""
        return self.samples / samples_per_second / 86400

    def dollars(self, samples_per_second: float, gpus: int) -> float | None:
        """Return what that costs on so many GPUs."""
        return None if self.price is None else self.days(samples_per_second) * 24 * gpus * float(self.price)

    def worth(self, samples_per_second: float, gpus: int) -> str:
        """Return days and dollars in words."""
        cost = self.dollars(samples_per_second, gpus)
        return f"{self.days(samples_per_second):.1f} days" + ("" if cost is None else f" and ${cost:,.0f}")

    def line(self, samples_per_second: float, gpus: int, batch: int) -> str:
        """Return the line beside a plan that updates every ``batch`` samples."""
        return (
            f"training    {self.worth(samples_per_second, gpus)} for {self.samples:,} samples, "
            f"{-(-self.samples // batch):,} batches of {batch / samples_per_second:.3f} s"
        )


def _whole(name: str, text: str) -> int:
    return int(_number(name, text, whole=True))


def _number(name: str, text: str, whole: bool) -> Fraction:
    found = Fraction(text) if NUMBER.fullmatch(text) else None
    if found is None or not 0 < found <= MOST or (whole and found.denominator != 1):
        kind, example = ("positive whole number", "100e6") if whole else ("positive number", "2.5")
        raise BadInput(f"{name}: '{shown(text, 40)}' is not a {kind} up to 1e18, such as {example}")
    return found
