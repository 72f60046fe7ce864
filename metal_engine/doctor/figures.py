"""Measured figures of the full report, the values that they should have, and verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import isnan
from typing import Any


class Verdict(StrEnum):
    """Result of comparing a figure with its promise."""

    AS_PROMISED = "as promised"
    BETTER = "better"
    WORSE = "worse"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Promise:
    """Value that a figure should have.

    Attributes:
        value: promised value, in the figure's unit.
        at_most: True if smaller figures are better, False if larger figures are better.
        slack: maximum deviation from ``value`` that still counts as promised, as a fraction of ``value``.
        is_required: True if the report fails when the figure is worse, because results are wrong. Other promises
            concern speed and memory.
        flag: flag or setting that helps if the figure is worse; empty if there is none.
    """

    value: float
    at_most: bool
    slack: float = 0.0
    is_required: bool = False
    flag: str = ""

    def judge(self, value: float) -> Verdict:
        """Compare a figure with the promise.

        A deviation within the slack is ``AS_PROMISED``. NaN is ``WORSE``. A required promise is never ``BETTER``.
        """
        margin = self.slack * abs(self.value)
        gain = self.value - value if self.at_most else value - self.value
        if isnan(gain) or gain < -margin:
            return Verdict.WORSE
        return Verdict.BETTER if gain > margin and not self.is_required else Verdict.AS_PROMISED

    def __str__(self) -> str:
        slack = f" ({self.slack:.0%} slack)" if self.slack else ""
        return f"at {'most' if self.at_most else 'least'} {format_number(self.value)}{slack}"


def at_most(value: float, *, slack: float = 0.0, required: bool = False, flag: str = "") -> Promise:
    """Return the promise that a figure is at most ``value``."""
    return Promise(value, True, slack, required, flag)


def at_least(value: float, *, slack: float = 0.0, required: bool = False, flag: str = "") -> Promise:
    """Return the promise that a figure is at least ``value``."""
    return Promise(value, False, slack, required, flag)


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name: description of the measurement.
        value: measured number; None if it could not be measured.
        unit: unit of ``value``; empty for ratios and counts.
        promise: expected value; None if the figure is only reported.
        note: further numbers of the measurement, or the reason for a missing ``value``.
        is_simulated: True if the simulator ran the kernels instead of a GPU.
    """

    name: str
    value: float | None
    unit: str = ""
    promise: Promise | None = None
    note: str = ""
    is_simulated: bool = False

    @property
    def verdict(self) -> Verdict:
        """Verdict about the figure: ``NOT_MEASURED`` without a value or a promise."""
        if self.value is None or self.promise is None:
            return Verdict.NOT_MEASURED
        return self.promise.judge(self.value)

    @property
    def is_failure(self) -> bool:
        """True if the figure shows wrong results."""
        return self.verdict is Verdict.WORSE and self.promise is not None and self.promise.is_required


def not_measured(name: str, reason: str) -> Figure:
    """Return a figure without a value."""
    return Figure(name, None, note=reason)


@dataclass(frozen=True)
class SectionResult:
    """Facts and figures of one section.

    Attributes:
        name: name of the section.
        model: name of the measured model; empty if the section needs no model.
        seconds: duration of the section.
        facts: pairs of a label and a text.
        error: reason why the section ended early; empty if it is complete.
    """

    name: str
    model: str = ""
    seconds: float = 0.0
    facts: list[tuple[str, str]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    error: str = ""

    @property
    def is_failure(self) -> bool:
        """True if the section ended early, or one of its figures shows wrong results."""
        return bool(self.error) or any(figure.is_failure for figure in self.figures)

    @classmethod
    def of(cls, values: dict[str, Any]) -> SectionResult:
        """Return the result whose fields are ``values``, as :func:`dataclasses.asdict` and JSON give them."""
        figures = [
            Figure(**{**one, "promise": None if one["promise"] is None else Promise(**one["promise"])})
            for one in values["figures"]
        ]
        facts = [(label, text) for label, text in values["facts"]]
        return cls(**{**values, "figures": figures, "facts": facts})


def format_number(value: float) -> str:
    """Format a number with three significant digits: 0.0123 and 12.3.

    Numbers from 1,000 on are rounded to integers, with separators of thousands: 12,345. Numbers below 0.001 have two
    digits and an exponent: 1.2e-05.
    """
    if value == 0 or isnan(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.3g}"
