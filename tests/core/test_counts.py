"""Counts of a stream while it runs."""

from typing import Any

from gateway.core.counts import StreamCounts


def chunk(prompt: int, sampled: int, *, index: int = 0, last: bool = False) -> dict[str, Any]:
    return {
        "choices": [{"index": index, "finish_reason": "stop" if last else None}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled},
    }


def test_the_engine_corrects_the_guessed_length_of_a_single_prompt() -> None:
    counting = StreamCounts((500,), 2)
    counting.observe("e", chunk(38, 1))
    counting.observe("e", chunk(38, 3, index=1, last=True))

    counts = counting.counts()

    assert counts is not None
    assert (counts.prompt, counts.extra_prompt, counts.sampled) == (38, 38, 4)


def test_the_lengths_of_several_prompts_are_as_counted_before() -> None:
    counting = StreamCounts((5, 7), 1)
    counting.observe("e", chunk(12, 2, index=1))

    counts = counting.counts()

    assert counts is not None
    assert (counts.prompt, counts.sampled) == (7, 2)
