"""Short slices of the ledger's benches: every counted token is in the books, and no race passes a budget."""

from pathlib import Path

from gateway.engines.launch import launch_scripted
from tests.bench import budgets, ledger
from tests.bench.killable import Place
from tests.engines.fixtures import endpoint_of, running_engine, scripted_spec


def test_every_token_that_an_engine_counts_is_in_the_ledger_whatever_clients_and_engines_do(
    tmp_path: Path,
) -> None:
    spec = scripted_spec()
    with running_engine(launch_scripted(spec, token_delay_ms=2), spec.url, tmp_path / "engine.log") as engine:
        amounts = ledger.Amounts(calls=80, engine_kills=1, seed=3)
        assert ledger.bench(engine, endpoint_of(spec, vocab_size=256), amounts, tmp_path / "data")


def test_callers_in_several_processes_cannot_pass_a_budget_through_two_gateways(tmp_path: Path) -> None:
    spec = scripted_spec()
    with running_engine(launch_scripted(spec, token_delay_ms=2), spec.url, tmp_path / "engine.log"):
        place = Place(data_dir=tmp_path / "data", endpoint=endpoint_of(spec, vocab_size=256))
        place.prepare()
        gateways = [place.gateway("one"), place.gateway("two")]
        try:
            for gateway in gateways:
                gateway.start()
            assert budgets.races(place, gateways, 6, seed=1) == 0
        finally:
            for gateway in gateways:
                gateway.stop()
