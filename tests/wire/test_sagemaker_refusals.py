"""What the SageMaker dialect refuses, and in which words: signatures, limits of botocore's models, state, strangers."""

import json
import re
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from gateway.wire.sagemaker.models import CONTROL, RUNTIME
from tests.wire.gateways import Gateway
from tests.wire.sagemaker_clients import (
    HUB_ARN,
    OUTPUT,
    REGION,
    ROLE,
    SDK_WARNINGS,
    boto,
    create,
    pair,
    wire_datum,
)
from tests.wire.signing import Signed

pytestmark = SDK_WARNINGS


@pytest.fixture(scope="module")
def control(gateway: Gateway) -> Any:
    return boto(gateway, CONTROL)


@pytest.fixture(scope="module")
def runtime(gateway: Gateway) -> Any:
    return boto(gateway, RUNTIME)


@pytest.fixture(scope="module")
def session(control: Any) -> str:
    """A session that is sampled and refused, and whose weights stay as they are."""
    return create(control, f"refusals-{time.time_ns()}")


class _At(SigV4Auth):
    """The signer at a moment of the test's choice."""

    def __init__(self, credentials: Credentials, at: datetime, service_name: str = "sagemaker") -> None:
        super().__init__(credentials, service_name, REGION)
        self._at = at

    def add_auth(self, request: AWSRequest) -> None:
        request.context["timestamp"] = self._at.strftime("%Y%m%dT%H%M%SZ")
        self._modify_request_before_signing(request)
        canonical = self.canonical_request(request)
        signature = self.signature(self.string_to_sign(request, canonical), request)
        self._inject_signature_to_request(request, signature)


def signed(
    gateway: Gateway,
    body: bytes,
    *,
    path: str = "/sagemaker",
    target: str | None = "SageMaker.ListTrainingSessions",
    key: str | None = None,
    skew: timedelta = timedelta(0),
    token: str | None = None,
    service_name: str = "sagemaker",
    sent: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """Send a request that was signed by hand.

    ``sent`` is another body than the signed one, ``headers`` are added, ``skew`` is how far this clock is ahead.
    """
    key_id, secret = pair(gateway.keys.owner if key is None else key)
    request = AWSRequest(method="POST", url=f"{gateway.url}{path}", data=body)
    request.headers["Content-Type"] = "application/x-amz-json-1.1"
    if target is not None:
        request.headers["X-Amz-Target"] = target
    signer = _At(Credentials(key_id, secret, token), datetime.now(UTC) + skew, service_name)
    signer.add_auth(request)
    own = {**dict(request.headers.items()), **(headers or {})}
    return httpx.post(f"{gateway.url}{path}", content=body if sent is None else sent, headers=own)


def refused(call: Any, /, **arguments: Any) -> tuple[str, str]:
    """Return the name and the message of a refusal."""
    with pytest.raises(ClientError) as raised:
        call(**arguments)
    error = raised.value.response["Error"]
    return error["Code"], error["Message"]


def training(runtime: Any, session: str, seq: int, **config: Any) -> Any:
    return runtime.execute_training_operation(trainingSessionName=session, sequenceNumber=seq, operationConfig=config)


def finish(runtime: Any, session: str, operation: str) -> dict[str, Any]:
    while True:
        answer = runtime.get_training_operation_result(trainingSessionName=session, operationId=operation)
        if answer["status"] not in ("Pending", "InProgress"):
            return answer


def finish_sample(runtime: Any, session: str, operation: str) -> dict[str, Any]:
    while True:
        answer = runtime.get_sampling_operation_result(trainingSessionName=session, operationId=operation)
        if answer["status"] != "InProgress":
            return answer


@pytest.mark.parametrize("path", ["/sagemaker", "/sagemaker/"])
def test_a_signature_made_by_hand_is_enough(gateway: Gateway, path: str) -> None:
    answer = signed(gateway, b"{}", path=path)
    assert answer.status_code == 200, answer.text
    assert "TrainingSessionSummaries" in answer.json()
    assert answer.headers["content-type"] == "application/x-amz-json-1.1"


def test_what_was_not_signed_by_a_key_of_ours_is_refused_in_one_way(gateway: Gateway) -> None:
    key_id, secret = pair(gateway.keys.owner)
    wrong = f"tml-{key_id}-{'0' * 43}"
    keys = gateway.keys
    answers = [
        signed(gateway, b"{}", key=wrong),
        signed(gateway, b"{}", key=keys.unknown),
        signed(gateway, b"{}", key=keys.revoked),
        signed(gateway, b"{}", key=keys.expired),
        signed(gateway, b"{}", sent=b'{"MaxResults":1}'),
        signed(gateway, b"{}", headers={"X-Amz-Target": "SageMaker.StopTrainingSession"}),
        signed(gateway, b"{}", headers={"Host": "["}),
    ]
    assert {answer.status_code for answer in answers} == {400}
    assert {answer.json()["__type"] for answer in answers} == {"UnrecognizedClientException"}
    assert len({answer.json()["message"] for answer in answers}) == 1
    assert secret not in "".join(answer.text for answer in answers)


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"token": "session-token"}, "UnrecognizedClientException", "unset AWS_SESSION_TOKEN"),
        ({"skew": timedelta(minutes=-6)}, "RequestTimeTooSkewed", "may differ by 300 seconds"),
        ({"skew": timedelta(minutes=6)}, "RequestTimeTooSkewed", "may differ by 300 seconds"),
        ({"service_name": "s3"}, "IncompleteSignature", "service sagemaker"),
        ({"headers": {"X-Amz-Extra": "unsigned"}}, "IncompleteSignature", "every X-Amz- header"),
        ({"headers": {"Authorization": "Bearer tml-x"}}, "IncompleteSignature", "signature version 4"),
        ({"target": "SageMaker.CreateEndpoint"}, "UnknownOperationException", "SageMaker.CreateEndpoint"),
        ({"target": None}, "UnknownOperationException", "not offered here"),
    ],
)
def test_a_request_that_cannot_be_taken_says_why(
    gateway: Gateway, change: dict[str, Any], name: str, message: str
) -> None:
    answer = signed(gateway, b"{}", **change)
    assert answer.status_code == 400
    assert answer.json()["__type"] == name
    assert message in answer.json()["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"TrainingSessionName": "bad_name"}, "TrainingSessionName must match the pattern"),
        ({"TrainingSessionName": "a" * 64}, "TrainingSessionName must have 1 to 63 characters, got 64"),
        ({"LoraConfig": {"Rank": 257, "Alpha": 1}}, "LoraConfig.Rank must be 1 to 256, got 257"),
        ({"RoleArn": "arn:aws:iam::000000000000:user/me"}, "RoleArn must match the pattern"),
        ({"Tags": [{"Key": "a|b", "Value": ""}]}, "Tags[0].Key must match the pattern"),
        ({"Tags": [{"Key": "aws:role-arn", "Value": ""}]}, "Tags[0].Key must be given once and must not start with"),
        ({"VpcConfig": {"Subnets": ["a"], "SecurityGroupIds": ["b"]}}, "VpcConfig is not offered here"),
        (
            {
                "OutputConfig": {
                    "S3Location": {"Path": OUTPUT, "KmsKeyArn": "arn:aws:kms:us-west-2:000000000000:key/abc"}
                }
            },
            "OutputConfig.S3Location.KmsKeyArn is not offered here",
        ),
    ],
)
def test_limits_that_botocore_leaves_to_the_server_are_checked_by_the_control_plane(
    control: Any, change: dict[str, Any], message: str
) -> None:
    options = {"name": "never-opened", **change}
    options["name"] = options.pop("TrainingSessionName", options["name"])
    name, told = refused(create, control=control, **options)
    assert name == "ValidationException"
    assert message in told


def test_what_is_not_there_is_not_found(control: Any, runtime: Any, session: str) -> None:
    missing = "no-such-session"
    elsewhere = f"{HUB_ARN.rsplit('/', 2)[0]}/other/1.0.0"
    group = "arn:aws:sagemaker:us-west-2:000000000000:model-package-group/missing"
    assert refused(control.describe_training_session, TrainingSessionName=missing)[0] == "ResourceNotFound"
    assert refused(control.stop_training_session, TrainingSessionName=missing)[0] == "ResourceNotFound"
    assert refused(lambda: create(control, "x", ModelConfig={"BaseModelArn": elsewhere}))[0] == "ResourceNotFound"
    assert refused(lambda: create(control, "x", ModelPackageGroupArn=group))[0] == "ResourceNotFound"
    assert refused(training, runtime=runtime, session=missing, seq=1, saveState={})[0] == "ResourceNotFoundException"
    for call in (runtime.get_training_operation_result, runtime.get_sampling_operation_result):
        code, _ = refused(call, trainingSessionName=session, operationId="op-unknown")
        assert code == "ResourceNotFoundException"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizerStep": {"adamParamsConfig": {"learningRate": 0.5}}}, "learningRate must be 0 to 0.01, got 0.5"),
        ({"optimizerStep": {"adamParamsConfig": {"learningRate": 0.0}}}, "learningRate must be above 0"),
        ({"saveState": {"description": "x" * 1025}}, "description must have 0 to 1024 characters, got 1025"),
        ({"forward": {"lossFnName": "cross_entropy", "datumList": []}}, "datumList must hold 1 to 1024 datums, got 0"),
        (
            {"forward": {"lossFnName": "dro", "datumList": [wire_datum([97])]}},
            "lossFnName must be one of cross_entropy, importance_sampling, ppo, cispo, got 'dro'",
        ),
        (
            {"forward": {"lossFnName": "ppo", "datumList": [wire_datum([97])]}},
            "operationConfig.forward.datumList[0].lossFnInputs needs logprobs",
        ),
        (
            {"forward": {"lossFnName": "cross_entropy", "datumList": [wire_datum([97], old_logprobs=[0.0])]}},
            "has no key 'old_logprobs'",
        ),
        (
            {"forward": {"lossFnName": "cross_entropy", "datumList": [wire_datum([97], weights=[float("nan")])]}},
            "datumList[0].lossFnInputs.weights[0] is not finite",
        ),
        (
            {
                "forward": {
                    "lossFnName": "ppo",
                    "datumList": [wire_datum([97, 98], logprobs=[-1.0, -1.0], advantages=[1.0])],
                }
            },
            "datumList[0].lossFnInputs.advantages must have shape [2] like modelInput, got [1]",
        ),
        (
            {
                "forward": {
                    "lossFnName": "cross_entropy",
                    "datumList": [wire_datum([97])],
                    "lossFnConfig": {"kl_coef": 0.1},
                }
            },
            "lossFnConfig has no key 'kl_coef'",
        ),
        (
            {
                "forward": {
                    "lossFnName": "cross_entropy",
                    "datumList": [{"modelInput": {"chunks": [{"tokens": [1], "type": "image"}]}}],
                }
            },
            "chunks[0].type must be one of encoded_text, got 'image'",
        ),
        (
            {"loadState": {"modelPackageArn": "nonsense", "loadOptimizer": True}},
            "modelPackageArn must be the ARN of a model package",
        ),
    ],
)
def test_a_training_operation_that_cannot_be_run_is_refused_by_field(
    runtime: Any, session: str, config: dict[str, Any], message: str
) -> None:
    name, told = refused(training, runtime=runtime, session=session, seq=9, **config)
    assert name == "ValidationException"
    assert message in told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samplingParams": {"maxTokens": 200_000}}, "samplingParams.maxTokens must be 512 to 131072, got 200000"),
        ({"samplingParams": {"maxTokens": 512, "temperature": 5}}, "samplingParams.temperature must be 0 to 2, got 5"),
        ({"numSamples": 5000}, "numSamples must be 1 to 1000, got 5000"),
        ({"numSamples": 300}, "numSamples must be 1 to 256, got 300"),
        ({"prompt": {"chunks": []}}, "prompt.chunks must have at least one chunk"),
        (
            {"prompt": {"chunks": [{"tokens": [256], "type": "encoded_text"}]}},
            "prompt[0] is 256; scripted has token ids 0 to 255",
        ),
        ({"topkPromptLogprobs": 50}, "topkPromptLogprobs must be 0 to 20, got 50"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_by_field(
    runtime: Any, session: str, change: dict[str, Any], message: str
) -> None:
    sample = {
        "prompt": {"chunks": [{"tokens": [97], "type": "encoded_text"}]},
        "numSamples": 1,
        "samplingParams": {"maxTokens": 512},
        **change,
    }
    name, told = refused(
        runtime.execute_sampling_operation, trainingSessionName=session, operationConfig={"sample": sample}
    )
    assert name == "ValidationException"
    assert message in told


def test_one_request_sent_five_times_has_one_effect(control: Any, runtime: Any) -> None:
    name = create(control, f"five-{time.time_ns()}")
    asked = {
        "trainingSessionName": name,
        "sequenceNumber": 3,
        "clientToken": "token-1",
        "operationConfig": {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": [wire_datum([97, 98])]}},
    }
    ids = {runtime.execute_training_operation(**asked)["operationId"] for _ in range(5)}
    assert len(ids) == 1
    result = finish(runtime, name, ids.pop())
    assert result["tokenUsage"] == {"trainingTokens": 2}
    assert int(result["ResponseMetadata"]["HTTPHeaders"]["x-loopline-cost-nanos"]) > 0
    changed = {**asked, "operationConfig": {"saveState": {}}}
    assert refused(runtime.execute_training_operation, **changed)[0] == "ValidationException"
    assert refused(runtime.execute_training_operation, **{**changed, "sequenceNumber": 7})[0] == "ValidationException"
    detail = control.describe_training_session(TrainingSessionName=name)["TrainingSessionDetail"]
    assert detail["LastReceivedSequenceNumber"] == 7  # refused, and so consumed
    assert detail["BillableTokenUsage"] == {"PrefillTokenCount": 0, "SampleTokenCount": 0, "TrainingTokenCount": 2}


def test_a_repeated_create_opens_one_session_and_another_name_twice_is_in_use(gateway: Gateway, control: Any) -> None:
    name = f"create-{time.time_ns()}"
    body = json.dumps(
        {
            "TrainingSessionName": name,
            "LoraConfig": {"Rank": 8, "Alpha": 16},
            "RoleArn": ROLE,
            "ModelConfig": {"BaseModelArn": HUB_ARN},
            "OutputConfig": {"S3Location": {"Path": OUTPUT}},
        }
    ).encode()
    again = {"amz-sdk-invocation-id": "7c0f2a54-1111-4222-8333-444455556666"}
    target = "SageMaker.CreateTrainingSession"
    answers = [signed(gateway, body, target=target, headers=again) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert answers[0].json() == answers[1].json()
    assert refused(create, control=control, name=name)[0] == "ResourceInUse"


def test_what_a_session_was_asked_for_is_told_and_where_its_files_are(control: Any) -> None:
    tags = [{"Key": "team", "Value": "é 1"}]
    name = create(control, f"told-{time.time_ns()}", Tags=tags)
    detail = control.describe_training_session(TrainingSessionName=name)["TrainingSessionDetail"]
    assert detail["TrainingSessionStatus"] == "Running"
    assert detail["RoleArn"] == ROLE
    assert detail["Tags"] == tags
    assert detail["LoraConfig"] == {"Rank": 8, "Alpha": 16}
    assert detail["ModelConfig"]["BaseModelArn"].endswith("Model/scripted/1.0.0")
    assert detail["OutputConfig"]["S3Location"]["Path"].startswith("s3://loopline-local-store/")
    assert "EndTime" not in detail


def test_work_after_a_stop_is_a_conflict_and_a_second_stop_is_told_as_the_sdk_knows_it(
    control: Any, runtime: Any
) -> None:
    name = create(control, f"stop-{time.time_ns()}")
    code, _ = refused(control.delete_training_session, TrainingSessionName=name)
    assert code == "ValidationException"
    control.stop_training_session(TrainingSessionName=name)
    code, message = refused(control.stop_training_session, TrainingSessionName=name)
    assert code == "ValidationException"
    assert "invalid session state transition from Stopped to " in message
    assert refused(training, runtime=runtime, session=name, seq=1, saveState={})[0] == "ConflictException"
    prompt = {"chunks": [{"tokens": [97], "type": "encoded_text"}]}
    code, _ = refused(
        runtime.execute_sampling_operation,
        trainingSessionName=name,
        operationConfig={"computeLogprobs": {"prompt": prompt}},
    )
    assert code == "ConflictException"
    control.delete_training_session(TrainingSessionName=name)
    assert refused(control.describe_training_session, TrainingSessionName=name)[0] == "ResourceNotFound"


def test_an_idle_session_expires(gateway: Gateway, control: Any, runtime: Any) -> None:
    name = create(control, f"idle-{time.time_ns()}")

    with gateway.client() as native:
        session = native.get(f"/sessions/{name}").json()
    assert session["ttl_seconds"] == gateway.settings.sagemaker_idle_s == 24 * 3600
    with closing(sqlite3.connect(gateway.settings.data_dir / "loopline.db")) as database, database:
        database.execute("UPDATE sessions SET expires_at = last_used_at WHERE id = ?", (session["id"],))
    while True:  # the sweeper comes by every second
        detail = control.describe_training_session(TrainingSessionName=name)["TrainingSessionDetail"]
        if detail["TrainingSessionStatus"] != "Running":
            break
    assert detail["TrainingSessionStatus"] == "Expired"
    assert refused(training, runtime=runtime, session=name, seq=1, saveState={})[0] == "ConflictException"


def test_a_checkpoint_that_does_not_fit_is_refused_under_its_name_here(
    gateway: Gateway, control: Any, runtime: Any
) -> None:
    first, other = create(control, f"fits-{time.time_ns()}"), f"unfit-{time.time_ns()}"
    create(control, other, LoraConfig={"Rank": 4, "Alpha": 8})
    saved = finish(runtime, first, training(runtime, first, 1, saveState={})["operationId"])
    training(runtime, other, 1, saveState={})
    arn = saved["operationResult"]["saveState"]["modelPackageArn"]
    config = {"loadState": {"modelPackageArn": arn, "loadOptimizer": True}}
    url = f"{gateway.url}/sagemaker/v1/training-sessions/{other}/operations"
    with httpx.Client(auth=Signed(gateway.keys.owner)) as client:
        answer = client.post(url, json={"sequenceNumber": 2, "operationConfig": config}).json()
    assert (answer["reason"], answer["field"]) == ("lora_mismatch", "operationConfig.loadState.modelPackageArn")


def test_a_key_that_may_only_sample_opens_and_trains_nothing(gateway: Gateway, session: str) -> None:
    key = gateway.keys.inference_only
    control, runtime = boto(gateway, CONTROL, key=key), boto(gateway, RUNTIME, key=key)
    assert refused(create, control=control, name="mine")[0] == "AccessDeniedException"
    assert refused(training, runtime=runtime, session=session, seq=1, saveState={})[0] == "AccessDeniedException"
    prompt = {"chunks": [{"tokens": [97, 98], "type": "encoded_text"}]}
    asked = runtime.execute_sampling_operation(
        trainingSessionName=session, operationConfig={"computeLogprobs": {"prompt": prompt}}
    )
    answer = finish_sample(runtime, session, asked["operationId"])
    assert answer["status"] == "Completed"
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert re.fullmatch(r"base:scripted|.+@[1-9]\d*", headers["x-loopline-version"])
    assert headers["x-loopline-fingerprint"]


def test_what_is_queued_when_a_session_stops_is_skipped(gateway: Gateway, control: Any, runtime: Any) -> None:
    base = HUB_ARN.replace("/scripted/", "/untrained/")  # no trainer takes its work
    name = create(control, f"skipped-{time.time_ns()}", ModelConfig={"BaseModelArn": base})
    operation = training(runtime, name, 1, saveState={})["operationId"]
    with ThreadPoolExecutor() as pool:  # a poll is held until there is something to say
        held = pool.submit(finish, runtime, name, operation)
        control.stop_training_session(TrainingSessionName=name)
        answer = held.result()
    assert answer["status"] == "Skipped"
    assert "before this operation ran" in answer["errorDetails"]


def test_openai_bodies_are_answered_by_the_sessions_weights_in_one_piece_and_streamed(
    gateway: Gateway, control: Any, runtime: Any
) -> None:
    name = create(control, f"chat-{time.time_ns()}")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 1}
    raw = json.dumps(body).encode()
    base = runtime.sample_training_session(trainingSessionName=name, body=raw, contentType="application/json")
    assert base["ResponseMetadata"]["HTTPHeaders"]["x-loopline-version"] == "base:scripted"

    seq = iter(range(1, 9))
    step = {"optimizerStep": {"adamParamsConfig": {"learningRate": 0.01}}}
    batch = {"forwardBackward": {"lossFnName": "cross_entropy", "datumList": [wire_datum([97, 98])]}}
    training(runtime, name, next(seq), **batch)
    training(runtime, name, next(seq), **step)
    saved = [finish(runtime, name, training(runtime, name, next(seq), saveWeights={})["operationId"]) for _ in range(2)]
    packages = [one["operationResult"]["saveWeights"]["modelPackageArn"] for one in saved]

    answer = runtime.sample_training_session(trainingSessionName=name, body=raw)
    whole = json.loads(answer["body"].read())
    assert answer["contentType"] == "application/json"
    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-loopline-version"].endswith("@2")
    pinned = runtime.sample_training_session(trainingSessionName=name, body=raw, modelPackageArn=packages[0])
    assert pinned["ResponseMetadata"]["HTTPHeaders"]["x-loopline-version"].endswith("@1")
    others = [json.loads(one["body"].read())["usage"] for one in (base, pinned)]

    stream = runtime.sample_training_session_with_response_stream(trainingSessionName=name, body=raw)
    frames = stream["body"].read().decode().split("\n\n")
    assert stream["contentType"].startswith("text/event-stream")
    assert frames[-2] == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]

    usage = control.describe_training_session(TrainingSessionName=name)["TrainingSessionDetail"]["BillableTokenUsage"]
    assert usage["TrainingTokenCount"] == 2
    told = [*others, whole["usage"], whole["usage"]]
    assert usage["SampleTokenCount"] == sum(one["completion_tokens"] for one in told)
    assert usage["PrefillTokenCount"] == sum(one["prompt_tokens"] for one in told)
    wrong = json.dumps({**body, "temperature": 9}).encode()
    code, message = refused(runtime.sample_training_session, trainingSessionName=name, body=wrong)
    assert code == "ValidationException"
    assert "temperature" in message
    code, _ = refused(runtime.sample_training_session, trainingSessionName=name, body=b"not json")
    assert code == "ValidationException"


@pytest.mark.parametrize("verb", ["sample", "sample-with-response-stream"])
def test_an_openai_body_that_is_nested_too_deep_to_be_passed_on_is_refused(
    gateway: Gateway, session: str, verb: str
) -> None:
    body = b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"
    url = f"{gateway.url}/sagemaker/training-sessions/{session}/{verb}"
    answer = httpx.post(
        url, content=body, headers={"Content-Type": "application/json"}, auth=Signed(gateway.keys.owner)
    )
    assert (answer.status_code, answer.json()["message"]) == (400, "the body is nested deeper than 200 levels")


def test_a_run_is_visible_and_chats_in_the_other_dialects(gateway: Gateway, control: Any, runtime: Any) -> None:
    name = create(control, f"seen-{time.time_ns()}", Tags=[{"Key": "tag", "Value": "mine"}])
    operation = training(runtime, name, 1, saveWeights={"description": "first"})["operationId"]
    arn = finish(runtime, name, operation)["operationResult"]["saveWeights"]["modelPackageArn"]
    with gateway.client() as native, gateway.openai_client() as openai:
        session = native.get(f"/sessions/{name}").json()
        address = session["latest_version"]
        for model in (name, address, arn):
            answer = openai.post("/completions", json={"model": model, "prompt": [97], "max_tokens": 2})
            assert answer.headers["X-Loopline-Version"] == address
        assert session["order"] == "ascending"
        assert session["user_metadata"]["tag"] == "mine"
    assert arn.endswith(f"/{address.replace('@', '/')}")
