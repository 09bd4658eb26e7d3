"""The SageMaker dialect at a key's limits: sessions, and bodies whose place in the session's order must not be lost."""

import json
import time
from typing import Any

import pytest

from gateway.core.principals import Scope
from gateway.wire.sagemaker.models import CONTROL, RUNTIME
from tests.wire.gateways import Gateway
from tests.wire.sagemaker_clients import SDK_WARNINGS, boto, create, wire_datum
from tests.wire.test_keys import key_of
from tests.wire.test_limits import limit
from tests.wire.test_sagemaker_refusals import finish, finish_sample, refused, signed, training

pytestmark = SDK_WARNINGS

LIMIT = 20_000
STEP = {"optimizerStep": {"adamParamsConfig": {"learningRate": 0.01}}}
BATCH = {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": [wire_datum([97, 98])]}}
LARGE = {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": [wire_datum([97, 98] * 2000)]}}


def test_a_session_beyond_the_quota_is_a_resource_limit_and_a_stopped_one_makes_room(gateway: Gateway) -> None:
    control = boto(gateway, CONTROL, key=limit(gateway, key_of(gateway), sessions=1))
    first = create(control, f"quota-{time.time_ns()}")
    code, message = refused(create, control=control, name=f"quota-{time.time_ns()}")
    assert code == "ResourceLimitExceeded"
    assert "sessions" in message
    control.stop_training_session(TrainingSessionName=first)
    assert create(control, f"quota-{time.time_ns()}")


def test_a_batch_that_is_too_large_has_had_its_turn_and_no_step_is_taken_without_it(gateway: Gateway) -> None:
    key = limit(gateway, key_of(gateway), body_bytes=LIMIT)
    control, runtime = boto(gateway, CONTROL, key=key), boto(gateway, RUNTIME, key=key)
    name = create(control, f"large-{time.time_ns()}")
    training(runtime, name, 1, **BATCH)
    code, message = refused(training, runtime=runtime, session=name, seq=2, **LARGE)
    assert (code, message) == ("ValidationException", f"the request body is larger than {LIMIT} bytes")
    assert last_received(control, name) == 2
    began = time.monotonic()
    step = finish(runtime, name, training(runtime, name, 3, **STEP)["operationId"])
    assert (step["status"], "incomplete_window" in step["errorDetails"]) == ("Failed", True)
    training(runtime, name, 4, **BATCH)
    assert finish(runtime, name, training(runtime, name, 5, **STEP)["operationId"])["status"] == "Completed"
    assert time.monotonic() - began < 30  # nothing waited for the number that was refused


def test_out_of_budget_is_told_at_once_has_its_turn_and_runs_nothing(gateway: Gateway) -> None:
    key = key_of(gateway)
    control, runtime = boto(gateway, CONTROL, key=key), boto(gateway, RUNTIME, key=key)
    name = create(control, f"poor-{time.time_ns()}")
    training(runtime, name, 1, **BATCH)
    with gateway.client() as admin:
        admin.put(f"/budgets/key/{key.split('-')[1]}", json={"hard_nanos": 1}).raise_for_status()
    code, message = refused(training, runtime=runtime, session=name, seq=2, **BATCH)
    assert (code, "budget" in message) == ("ValidationException", True)
    step = finish(runtime, name, training(runtime, name, 3, **STEP)["operationId"])
    assert (step["status"], "incomplete_window" in step["errorDetails"]) == ("Failed", True)
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}).encode()
    base = create(control, f"poor-{time.time_ns()}")
    assert refused(runtime.sample_training_session, trainingSessionName=base, body=chat)[0] == "ValidationException"
    sample = {"prompt": {"chunks": [{"tokens": [97], "type": "encoded_text"}]}, "numSamples": 1}
    config = {"sample": {**sample, "samplingParams": {"maxTokens": 512}}}
    asked = runtime.execute_sampling_operation(trainingSessionName=base, operationConfig=config)
    told = finish_sample(runtime, base, asked["operationId"])
    assert (told["status"], "insufficient_quota" in told["errorDetails"]) == ("Failed", True)
    spent = control.describe_training_session(TrainingSessionName=base)["TrainingSessionDetail"]["BillableTokenUsage"]
    assert set(spent.values()) == {0}


@pytest.mark.parametrize("forged", ["another body", "a key that may not train"])
def test_who_may_not_train_takes_nobodys_turn(gateway: Gateway, forged: str) -> None:
    key = limit(gateway, key_of(gateway), body_bytes=LIMIT)
    control = boto(gateway, CONTROL, key=key)
    name = create(control, f"forged-{time.time_ns()}")
    if forged == "another body":
        body = json.dumps({"sequenceNumber": 2, "operationConfig": LARGE}).encode()
        path = f"/sagemaker/v1/training-sessions/{name}/operations"
        answer = signed(gateway, b"{}", path=path, target=None, key=key, sent=body)
        assert (answer.status_code, answer.json()["__type"]) == (403, "UnrecognizedClientException")
    else:
        sampler = limit(gateway, key_of(gateway, scopes=frozenset({Scope.INFERENCE})), body_bytes=LIMIT)
        code, _ = refused(training, runtime=boto(gateway, RUNTIME, key=sampler), session=name, seq=2, **LARGE)
        assert code == "AccessDeniedException"
    assert last_received(control, name) == 0


def last_received(control: Any, name: str) -> int:
    detail = control.describe_training_session(TrainingSessionName=name)["TrainingSessionDetail"]
    return detail["LastReceivedSequenceNumber"]
