"""What the ``tinker`` SDK relies on without asking: values of the first answers, what arrives of a batch and of a step,
how samples are bounded, and how a result that is not there yet is told of."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from gateway.core.ids import KeyId, OperationId, ProjectId, SessionId
from gateway.core.opening import new_session
from gateway.core.operations import Operation, Progress, Status
from gateway.core.payloads import Forward, ForwardBackward, OperationKind, OptimStep, Payload
from gateway.core.ports import UnitOfWork
from gateway.core.sampling import SamplingParams
from gateway.core.sessions import Activity, OrderRule, Session
from gateway.wire.tinker import futures, questions
from gateway.wire.tinker.sampling_schemas import SampleAsked
from tests.core.builders import MODEL
from tests.trainer.builders import lora
from tests.wire.gateways import Gateway
from tests.wire.test_tinker_refusals import asked, new_client, ok, raw, result, sampler
from tests.wire.tinker_clients import (
    SDK_WARNINGS,
    datum,
    model_input,
    sdk_is_collected,
    tinker_service,
    training_client,
)

__all__ = ["raw", "sdk_is_collected"]

pytestmark = SDK_WARNINGS


@pytest.fixture(scope="module")
def service(gateway: Gateway) -> Iterator[tinker.ServiceClient]:
    with tinker_service(gateway) as service:
        yield service


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return training_client(service)


def test_what_a_program_asks_first_is_answered_with_what_the_sdk_expects(raw: httpx.Client) -> None:
    version = {"sdk_version": tinker.__version__}
    config = types.ClientConfigResponse.model_validate(ok(raw.post("/client/config", json=version)))
    assert (config.parallel_fwdbwd_chunks, config.fwdbwd_max_chunk_len, config.custom_loss_server_side) == (
        True,
        1024,
        True,
    )
    assert (config.pjwt_auth_enabled, config.credential_default_source) == (False, "api_key")
    dynamic = ok(raw.post("/client/dynamic_config", json=version))
    assert dynamic == {
        "refresh_interval_sec": 300,
        "sample_cancel_enabled": True,
        "sample_cancel_max_batch_size": 64,
    }
    session = new_client(raw)
    assert "/" not in session
    assert session != new_client(raw)
    assert ok(raw.post("/session_heartbeat", json={"session_id": session})) == {"type": "session_heartbeat"}
    assert ok(raw.post("/telemetry", json={"events": [], "session_id": "sessionless-1"})) == {"status": "accepted"}
    assert ok(raw.get("/healthz")) == {"status": "ok"}


def newest(gateway: Gateway, training: tinker.TrainingClient) -> Payload:
    """Return what the operation log holds of the model's newest operation."""
    with gateway.client() as native:
        session = native.get(f"/sessions/{training.model_id}").json()
        operations = native.get(f"/sessions/{training.model_id}/operations").json()["data"]
    newest = OperationId(max(operations, key=lambda operation: operation["seq"])["id"])

    async def read(unit: UnitOfWork) -> Payload:
        project = await unit.keys.ensure_project("mine")
        operation = await unit.operations.get(project, newest)
        return await unit.blobs.get_payload(project, operation.payload_digest)

    assert session["id"].startswith("sess-")
    return gateway.in_unit(read)


def test_the_six_fields_of_a_step_arrive_and_have_the_sdks_defaults(
    gateway: Gateway, training: tinker.TrainingClient
) -> None:
    defaults = types.AdamParams().model_dump()
    assert asdict(OptimStep()) == {**defaults, "lora_plus_lr_ratio": 1.0}
    given = {
        "learning_rate": 3e-3,
        "beta1": 0.5,
        "beta2": 0.75,
        "eps": 1e-6,
        "weight_decay": 0.25,
        "grad_clip_norm": 2.0,
    }
    assert given.keys() == defaults.keys()
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(types.AdamParams(**given)).result()
    assert newest(gateway, training) == OptimStep(**given)


CLIPS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}
LOSSES: Mapping[str, tuple[dict[str, float], list[str]]] = {
    "importance_sampling": ({}, []),
    "ppo": (CLIPS, []),
    "cispo": ({}, [*CLIPS]),
    "dro": ({"beta": 0.05}, []),
    "gspo": (CLIPS, ["sequence_ratio_mask"]),
}


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_policy_loss_arrives_with_its_inputs_and_settings_and_spans_are_tolerated(
    gateway: Gateway, training: tinker.TrainingClient, loss_fn: Any
) -> None:
    config, extra = LOSSES[loss_fn]
    inputs = {
        "target_tokens": np.array([98, 99, 100]),
        "logprobs": np.array([-1.5, -1.25, -1.75], dtype=np.float32),
        "advantages": np.array([0.0, -0.5, 2.0], dtype=np.float32),
        **{name: np.array([1.0, 1.25, 1.5], dtype=np.float32) for name in extra},
    }
    spans = [
        types.PromptProvenanceSpan(sequence_id="a", length=1),
        types.SampledProvenanceSpan(sequence_id="a", length=2),
    ]
    data = types.Datum(
        model_input=model_input([97, 98, 99]),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
        model_input_spans=spans,
        loss_fn_input_spans=spans,
    )
    result = training.forward_backward([data], loss_fn, config or None).result()
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert result.metrics["loss:sum"] == pytest.approx(-float((inputs["advantages"] * logprobs).sum()))
    payload = newest(gateway, training)
    assert isinstance(payload, ForwardBackward)
    assert (payload.loss_fn, dict(payload.loss_fn_config)) == (loss_fn, config)
    arrived = {name: list(tensor.values()) for name, tensor in payload.data[0].loss_fn_inputs.items()}
    assert arrived == {name: values.tolist() for name, values in inputs.items()}


def test_a_loss_without_a_formula_is_refused_with_those_to_use(training: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="use importance_sampling, ppo, cispo, dro or gspo"):
        training.forward_backward([datum()], "stable_reinforce").result()


def test_a_forward_pass_leaves_no_gradient_and_a_failed_result_says_whose_fault_it_is(
    gateway: Gateway, training: tinker.TrainingClient
) -> None:
    training.forward([datum()], "cross_entropy").result()
    assert isinstance(newest(gateway, training), Forward)
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient") as failed:
        training.optim_step(types.AdamParams()).result()
    assert failed.value.category == "user"


def test_a_request_of_more_than_five_megabytes_is_taken(
    gateway: Gateway, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    length, alternatives = 500, 60
    targets = np.tile(np.arange(alternatives), (length, 1))
    inputs = {"target_tokens": targets, "weights": np.full((length, alternatives), 0.5, dtype=np.float32)}
    data = types.Datum(
        model_input=model_input([97] * length),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in inputs.items()},
    )
    assert 16 * sum(values.nbytes for values in inputs.values()) > 5e6
    future = training.forward([data] * 16, "cross_entropy")
    outputs = future.result().loss_fn_outputs
    assert [output["logprobs"].to_numpy().shape for output in outputs] == [(length, alternatives)] * 16


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_tokens": None, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": (), "ignore_eos": False}),
        ({"stop": []}, {"stop": (), "stop_token_ids": (), "ignore_eos": True}),
        ({"stop": [7, 9]}, {"stop": (), "stop_token_ids": (7, 9), "ignore_eos": False}),
        ({"stop": "\n\nUser:"}, {"stop": ("\n\nUser:",), "stop_token_ids": (), "ignore_eos": False}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b"), "stop_token_ids": (), "ignore_eos": False}),
        (
            {"max_tokens": 3, "temperature": 0.0, "top_k": 4, "top_p": 0.5, "seed": 11},
            {"max_tokens": 3, "temperature": 0.0, "top_k": 4, "top_p": 0.5, "seed": 11},
        ),
    ],
)
def test_what_bounds_a_sample_means_what_it_means_to_the_sdk(given: dict[str, Any], expected: dict[str, Any]) -> None:
    sent = types.SamplingParams(**given).model_dump(mode="json", exclude_none=True)
    body = SampleAsked.model_validate(
        {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": sent,
            "num_samples": 1,
            "sampling_session_id": "s",
            "seq_id": 0,
        }
    )
    params: SamplingParams = questions.question_of(body, MODEL).request.params
    assert {name: getattr(params, name) for name in expected} == expected


def test_a_sample_that_is_given_up_after_its_answer_keeps_it(raw: httpx.Client) -> None:
    future = ok(raw.post("/asample", json=asked(sampler(raw))))
    answer = result(raw, future).content
    assert raw.post("/cancel_future", json={"request_id": future["request_id"]}).status_code == 204
    assert result(raw, future).content == answer
    unknown = raw.post("/cancel_future", json={"request_id": "smp-0"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "sample_not_found")


def waiting(**changes: Any) -> tuple[str, str | None]:
    """Return what is told of an operation without a result."""
    at = datetime.now(UTC)
    session: Session = new_session(
        project_id=ProjectId("proj-a"),
        key_id=KeyId("a"),
        model=MODEL,
        lora=lora(),
        order=OrderRule.STRICT,
        at=at,
        ttl_s=60,
    )
    session = replace(session, activity=changes.pop("activity", Activity.ACTIVE))
    operation = Operation(
        id=OperationId("op-a"),
        session_id=SessionId("sess-a"),
        project_id=ProjectId("proj-a"),
        key_id=KeyId("a"),
        seq=4,
        kind=OperationKind.FORWARD,
        status=changes.pop("status", Status.QUEUED),
        payload_digest="",
        created_at=at,
        started_at=None,
        finished_at=None,
        outcome=None,
        queue_position=changes.pop("queue_position", None),
        waits_for_seq=changes.pop("waits_for_seq", None),
        progress=changes.pop("progress", None),
    )
    told = futures._waiting(operation, session).model_dump()
    assert (told["type"], told["request_id"]) == ("try_again", "op-a")
    return told["queue_state"], told["queue_state_reason"]


def test_a_result_that_is_not_there_yet_says_why_and_is_asked_for_again_in_time() -> None:
    assert futures.HOLD_S < 30
    assert waiting(waits_for_seq=3, queue_position=1) == ("active", "request 2 has not arrived, and comes first")
    assert waiting(queue_position=2) == ("active", "2 earlier requests of this model come first")
    assert waiting() == ("paused_capacity", "the trainer is busy with other models, or away")
    assert waiting(activity=Activity.RECOVERING)[0] == "paused_capacity"
    assert waiting(status=Status.RUNNING, progress=Progress(done=3, total=8)) == ("active", "3 of 8 datums are done")
    assert waiting(status=Status.RUNNING) == ("active", None)
