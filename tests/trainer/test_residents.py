import pytest

from gateway.core.ids import SessionId
from gateway.core.ports import Lease
from trainer.residents import Resident

LEASE = Lease(session_id=SessionId("sess-a"), owner="trainer", epoch=1)


@pytest.mark.parametrize(
    ("replay_s", "snapshot_s", "due"),
    [
        (0.9, 0.02, False),  # a snapshot of 0.02 s pays after 1 s
        (1.1, 0.02, True),
        (19.0, 2.0, False),  # an expensive one waits for the longest replay
        (21.0, 2.0, True),
    ],
)
def test_a_snapshot_is_due_after_50_times_its_cost_or_the_longest_replay(
    replay_s: float, snapshot_s: float, due: bool
) -> None:
    resident = Resident(lease=LEASE, applied_seq=1, snapshot=None, replay_s=replay_s, snapshot_s=snapshot_s)

    assert resident.needs_snapshot(20.0) is due
