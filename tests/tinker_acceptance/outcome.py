"""What a recipe has to show, and the table of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A metric at a run's start and at its end; ``learned`` says whether it moved as far as ``bar`` says."""

    what: str
    before: float
    after: float
    bar: str
    learned: bool


def falls(what: str, curve: Sequence[float], *, below: float) -> Outcome:
    """The last value has to be less than ``below`` times the first."""
    first, last = curve[0], curve[-1]
    return Outcome(what=what, before=first, after=last, bar=f"< {below:g} x", learned=last < below * first)


def rises(what: str, curve: Sequence[float], *, by: float, over: int) -> Outcome:
    """The mean of the last ``over`` values has to exceed that of the first ``over`` by ``by``."""
    first, last = fmean(curve[:over]), fmean(curve[-over:])
    return Outcome(what=what, before=first, after=last, bar=f"+ {by:g}", learned=last - first > by)


def same(what: str, straight: float, resumed: float) -> Outcome:
    """Both have to be equal, to the last bit."""
    return Outcome(what=what, before=straight, after=resumed, bar="equal", learned=straight == resumed)


def table(rows: Sequence[tuple[str, Outcome | str, float]]) -> str:
    """Return a line for each recipe: name, outcome (or why there is none), seconds."""
    head = f"{'recipe':15}  {'metric':34}  {'before':>10}  {'after':>10}  {'bar':>36}  {'':6}  {'time':>6}"
    written = [head, "-" * len(head)]
    for name, outcome, seconds in rows:
        if isinstance(outcome, str):
            written.append(f"{name:15}  {outcome.splitlines()[0][:102]:102}  FAILED  {seconds:4.0f} s")
            continue
        verdict = "ok" if outcome.learned else "MISSED"
        numbers = f"{outcome.before:10.4f}  {outcome.after:10.4f}  {outcome.bar:>36}"
        written.append(f"{name:15}  {outcome.what:34}  {numbers}  {verdict:6}  {seconds:4.0f} s")
    return "\n".join(written)
