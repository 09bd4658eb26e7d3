"""The accounts, and how each kind of posting moves them.

| posting | debit (+) | credit (-) |
|---|---|---|
| usage | ``project/ID`` owes more | ``revenue/METER`` |
| credit | ``credits`` given away | ``project/ID`` owes less |
| refund | ``refunds`` paid back | ``project/ID`` owes less |
| adjustment | ``project/ID`` or ``adjustments`` | the other one |

A balance is the sum of an account's entries. A project's balance is what it owes; negative, what it has left.
"""

from dataclasses import dataclass
from enum import StrEnum

HOUSE_PROJECT = "proj-house"  # what the gateway consumes itself (canaries, probes, lost calls): counted, never priced


class Kind(StrEnum):
    """Why a posting exists."""

    USAGE = "usage"
    CREDIT = "credit"
    REFUND = "refund"
    ADJUSTMENT = "adjustment"


@dataclass(frozen=True, slots=True)
class Entry:
    """One half of a posting: nano-USD on one account, positive on the debit side."""

    account: str
    amount: int


def entries_of(kind: Kind, project_id: str, meter: str, amount: int) -> tuple[Entry, Entry]:
    """Return the two halves of a posting that makes ``project_id`` owe ``amount`` more (negative: less)."""
    counterpart = {
        Kind.USAGE: f"revenue/{meter}",
        Kind.CREDIT: "credits",
        Kind.REFUND: "refunds",
        Kind.ADJUSTMENT: "adjustments",
    }[kind]
    return Entry(project_account(project_id), amount), Entry(counterpart, -amount)


def project_account(project_id: str) -> str:
    return f"project/{project_id}"


def check_direction(kind: Kind, amount: int) -> None:
    """Usage is never negative, credits and refunds never positive; an adjustment goes either way, never nowhere.

    Raises:
        ValueError: the amount has the wrong sign.
    """
    wrong = {
        Kind.USAGE: amount < 0,
        Kind.CREDIT: amount >= 0,
        Kind.REFUND: amount >= 0,
        Kind.ADJUSTMENT: amount == 0,
    }[kind]
    if wrong:
        raise ValueError(f"a posting of kind {kind} must not make a project owe {amount} nano-USD more")
