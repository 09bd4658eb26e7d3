"""``make fuzz``: spoil requests by the thousand and print what came of it; status 1 when anything broke or hung."""

import argparse
import tempfile
import time
from pathlib import Path

from tests.engines.fixtures import running_scripted_engine
from tests.fuzz.campaign import every_operation, log_faults, run
from tests.wire.gateways import running_gateway


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as where, running_scripted_engine(Path(where)) as engine:
        every = every_operation(Path(where))
        with running_gateway(engine, Path(where) / "data", trainer=True) as gateway:
            began = time.monotonic()
            outcome = run(gateway, every, count=asked.count, seed=asked.seed)
            alive = gateway.process.poll() is None
            errors = [line for line in gateway.log.read_text().splitlines() if '"level":"error"' in line]
            faults = log_faults(gateway)
    for line in [*outcome.broken, *outcome.hung, *outcome.leaks, *errors, *faults][:20]:
        print(line)
    print(
        f"FUZZ operations {len(every)} requests {outcome.requests} five_hundreds {len(outcome.broken)} "
        f"hangs {len(outcome.hung)} restarts {0 if alive else 1} errors_logged {len(errors)} "
        f"leaks {len(outcome.leaks)} bad_log_lines {len(faults)} "
        f"slowest_s {outcome.slowest_s:.2f} seconds {time.monotonic() - began:.0f}"
    )
    print("statuses", dict(sorted(outcome.statuses.items())))
    return 0 if alive and not (outcome.broken or outcome.hung or outcome.leaks or faults) else 1


if __name__ == "__main__":
    raise SystemExit(main())
