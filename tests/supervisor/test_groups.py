"""Signals to process groups reach children only."""

import signal

import pytest

from gateway.supervisor import groups


@pytest.mark.parametrize("group", [0, 1, -1])
def test_no_signal_is_sent_to_a_group_that_cannot_be_a_childs(group: int) -> None:
    with pytest.raises(ValueError, match=f"^{group} is no process group of a child"):
        groups.signal_group(group, signal.SIGURG)  # ignored by default, should it be sent all the same
