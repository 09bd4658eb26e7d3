"""``make fuzz``: spoil requests by the thousand, make as many of the schemas; status 1 when anything broke or hung."""

import argparse
import tempfile
import time
from pathlib import Path

from tests.engines.fixtures import running_scripted_engine
from tests.fuzz import by_schema
from tests.fuzz.campaign import app_of_all, log_faults, run
from tests.tenancy.routers import operations
from tests.wire.gateways import running_gateway


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as where, running_scripted_engine(Path(where)) as engine:
        app = app_of_all(Path(where))
        every = operations(app)
        with running_gateway(engine, Path(where) / "data", trainer=True) as gateway:
            began = time.monotonic()
            spoiled = run(gateway, every, count=asked.count, seed=asked.seed)
            between = time.monotonic()
            made = by_schema.run(gateway, app, every, count=asked.count, number=asked.seed)
            ended = time.monotonic()
            alive = gateway.process.poll() is None
            errors = [line for line in gateway.log.read_text().splitlines() if '"level":"error"' in line]
            faults = log_faults(gateway)
    both = (("spoiled", spoiled, between - began), ("by_schema", made, ended - between))
    for _, outcome, _ in both:
        for line in [*outcome.broken, *outcome.hung, *outcome.leaks][:20]:
            print(line)
    for line in [*errors, *faults][:20]:
        print(line)
    for name, outcome, seconds in both:
        print(
            f"FUZZ {name} requests {outcome.requests} operations {len(outcome.operations)}/{len(every)} "
            f"five_hundreds {len(outcome.broken)} hangs {len(outcome.hung)} leaks {len(outcome.leaks)} "
            f"slowest_s {outcome.slowest_s:.2f} seconds {seconds:.0f} statuses {dict(sorted(outcome.statuses.items()))}"
        )
    print(f"FUZZ restarts {0 if alive else 1} errors_logged {len(errors)} bad_log_lines {len(faults)}")
    sound = all(not (outcome.broken or outcome.hung or outcome.leaks) for _, outcome, _ in both)
    return 0 if alive and sound and not (errors or faults) else 1


if __name__ == "__main__":
    raise SystemExit(main())
