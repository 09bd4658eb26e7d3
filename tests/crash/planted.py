"""Trainers with a planted defect: the harness must find each of them, or it finds nothing.

They are the real trainer but for one lie, told once, when a step of the run is reached.
"""

import os
from collections.abc import Sequence
from typing import Any

from trainer.__main__ import main as trainer_main

DEFECTS = ("double_apply", "lost_operation")
_AT_CALL = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainer with the defect that the environment variable ``PLANTED`` names."""
    from trainer.peft_backend import PeftBackend

    backend: Any = PeftBackend
    original, calls = backend.forward_backward, 0

    def forward_backward(self: Any, session_id: Any, payload: Any, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        before = self.tenants.use(session_id).window
        result = original(self, session_id, payload, *rest)
        if calls == _AT_CALL and os.environ["PLANTED"] == "lost_operation":
            tenant = self.tenants.use(session_id)
            tenant.window = [tensor * 0 for tensor in tenant.window] if before is None else before
        if calls == _AT_CALL and os.environ["PLANTED"] == "double_apply":
            result = original(self, session_id, payload, *rest)
        return result

    backend.forward_backward = forward_backward
    return trainer_main(list(arguments or ()))
