"""The real SageMaker SDK and boto3 against a test's gateway, and the few things that their tests start with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from botocore.config import Config
from sagemaker.train.training_session import Datum, ModelInput, ServiceClient, TensorData, TensorDtype

from tests.wire.gateways import Gateway
from tests.wire.training import BASE

ROLE = "arn:aws:iam::000000000000:role/loopline"
OUTPUT = "s3://my-bucket/runs"
REGION = "us-west-2"
HUB_ARN = f"arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/{BASE}/1.0.0"
RUNTIME = "sagemakertrainingsessionruntime"

SDK_WARNINGS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # boto3 leaves its connections open
    pytest.mark.filterwarnings("ignore:.*protected namespace.*:UserWarning"),
]


def pair(key: str) -> tuple[str, str]:
    """Return a key as AWS spells it: access key id and secret."""
    _, key_id, secret = key.split("-")
    return key_id, secret


@contextmanager
def environment(url: str, key: str) -> Iterator[None]:
    """Point the SDK at a gateway, the way its users do."""
    key_id, secret = pair(key)
    values = {
        "SAGEMAKER_TRAINING_SESSION_ENDPOINT": f"{url}/sagemaker",
        "SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT": f"{url}/sagemaker",
        "AWS_ENDPOINT_URL_SAGEMAKER": f"{url}/sagemaker",
        "AWS_ACCESS_KEY_ID": key_id,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        yield


def service_client(**options: Any) -> ServiceClient:
    return ServiceClient(role_arn=ROLE, s3_output_path=OUTPUT, region=REGION, **options)


def boto(gateway: Gateway, service: str, *, key: str | None = None, **options: Any) -> Any:
    """Return a plain boto3 client that tries once."""
    key_id, secret = pair(gateway.keys.owner if key is None else key)
    return boto3.Session().client(
        service,
        region_name=REGION,
        endpoint_url=f"{gateway.url}/sagemaker",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}),
        **options,
    )


def datum(length: int = 4, token: int = 97, **inputs: Any) -> Datum:
    """Tokens counted upwards from ``token``, each predicting the next with weight 1."""
    return Datum(
        model_input=ModelInput.from_ints(list(range(token, token + length))),
        loss_fn_inputs={
            "target_tokens": TensorData(data=list(range(token + 1, token + length + 1)), dtype=TensorDtype.INT64),
            "weights": TensorData(data=[1.0] * length),
            **{name: TensorData(data=list(values)) for name, values in inputs.items()},
        },
    )


def create(control: Any, name: str, **options: Any) -> str:
    """Open a session by boto3 and return its name."""
    control.create_training_session(
        **{
            "TrainingSessionName": name,
            "LoraConfig": {"Rank": 8, "Alpha": 16},
            "RoleArn": ROLE,
            "ModelConfig": {"BaseModelArn": HUB_ARN},
            "OutputConfig": {"S3Location": {"Path": OUTPUT}},
            **options,
        }
    )
    return name


def wire_datum(tokens: Sequence[int], **inputs: Any) -> dict[str, Any]:
    """A datum as it travels."""
    length = len(tokens)
    given = {
        "target_tokens": {"data": [token + 1 for token in tokens], "dtype": "int64", "shape": [length]},
        "weights": {"data": [1.0] * length, "dtype": "float32", "shape": [length]},
    }
    for name, values in inputs.items():
        given[name] = {"data": list(values), "dtype": "float32", "shape": [len(values)]}
    return {
        "modelInput": {"chunks": [{"tokens": list(tokens), "type": "encoded_text"}]},
        "lossFnInputs": given,
    }
