"""Memory that ran out while something computed, although the estimates of ``memory`` had let it pass.

That ends one operation, never the process: allocators raise and keep what they gave before. torch raises an error of
its own on devices and a plain RuntimeError on the CPU, so it is known by its text.
"""

from gateway.core.errors import Invalid, Unavailable

_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def ran_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)
    )


def too_large(what: str, field: str) -> Invalid:
    """Return the refusal of a pass over the user's data: less of it may fit."""
    return Invalid(
        f"the trainer ran out of memory while it computed this {what}; nothing was changed. Send less at a time: "
        "fewer or shorter sequences, fewer alternatives per position",
        code="out_of_memory",
        field=field,
    )


def short_of_memory() -> Unavailable:
    """Return the failure of anything else: the user has nothing to make smaller."""
    return Unavailable(
        "the trainer ran out of memory; the session goes on from the state before this operation. Try again later",
        code="trainer_out_of_memory",
    )
