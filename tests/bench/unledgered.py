"""A gateway that keeps no ledger: nothing is held, and nothing is settled. Usage facts are recorded all the same."""

from gateway.__main__ import main
from gateway.store.no_ledger import NoLedger

if __name__ == "__main__":
    raise SystemExit(main(lambda *_: NoLedger))
