"""The benchmark compares like with like, and says what it found."""

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.bench.fresh import cosines
from tests.bench.gateway import Side
from tests.bench.options import Options
from tests.bench.report import Report, alternate
from tests.bench.report import Side as TimedSide
from tests.stack import EngineEndpoint


def test_in_float32_the_bare_loop_and_the_backend_compute_one_gradient(tiny_model: Path) -> None:
    options = Options(
        model=tiny_model,
        dtype=torch.float32,
        bare_dtype=torch.float32,
        quick=True,
        threads=torch.get_num_threads(),
        repeat=None,
    )

    found = cosines(options, seed=0)

    assert set(found) == {"arithmetic GRPO", "chat SFT"}
    assert min(found.values()) > 1 - 1e-8


def test_sides_take_turns_and_their_first_round_is_not_timed() -> None:
    order: list[str] = []

    timed = alternate([TimedSide(name=name, run=lambda name=name: order.append(name)) for name in "ab"], times=3)

    assert order == ["a", "b"] * 4
    assert {name: len(each.seconds) for name, each in timed.items()} == {"a": 3, "b": 3}


def test_a_program_reads_one_line_per_bar() -> None:
    written = StringIO()
    report = Report(console=Console(file=written, width=200, highlight=False))

    report.ratio("sft", 1.6489)
    report.ratio("memory", 1.2)
    report.finish()

    lines = [line for line in written.getvalue().splitlines() if line.startswith("RATIO ")]
    assert lines == ["RATIO sft 1.649", "RATIO memory 1.2"]
    assert "missed" in written.getvalue()


def test_the_load_of_the_gateway_bench_is_what_it_says_and_nothing_is_lost(scripted_engine: EngineEndpoint) -> None:
    side = Side(url=scripted_engine.url, key=scripted_engine.key, model=scripted_engine.name)

    whole = side.turn(concurrency=3, requests=20, stream=False)
    streamed = side.turn(concurrency=3, requests=20, stream=True)

    assert whole.statuses == streamed.statuses == {"200": 20}
    assert len(whole.latencies_s) == len(whole.firsts_s) == 20
    assert whole.at(0.5) <= whole.at(0.95) <= whole.seconds
    assert streamed.body_bytes > 2 * whole.body_bytes
    with pytest.raises(RuntimeError, match="401"):
        Side(url=side.url, key="wrong", model=side.model).turn(concurrency=1, requests=1, stream=False)
