"""Signature version 4 for requests of httpx: what AWS's clients do, for requests that those would never send."""

import hashlib
from collections.abc import Generator

import httpx
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

REGION = "us-west-2"


class _Signer(SigV4Auth):
    """botocore's signer of a body of which it is told the hash."""

    def __init__(self, credentials: Credentials, digest: str) -> None:
        super().__init__(credentials, "sagemaker", REGION)
        self._digest = digest

    def payload(self, request: object) -> str:
        return self._digest


def sign(request: httpx.Request, key: str) -> httpx.Request:
    """Sign ``request``, as it is, with the two parts of ``key``; return it."""
    _, key_id, secret = (*key.split("-"), "")[:3]
    aws = AWSRequest(method=request.method, url=f"http://host{request.url.raw_path.decode()}")
    for name, value in request.headers.items():
        if name == "host" or name.startswith("x-amz-"):
            aws.headers[name] = value
    _Signer(Credentials(key_id, secret), hashlib.sha256(request.content).hexdigest()).add_auth(aws)
    for name in ("X-Amz-Date", "Authorization"):
        request.headers[name] = aws.headers[name]
    return request


class Signed(httpx.Auth):
    """Signs every request of a client."""

    requires_request_body = True

    def __init__(self, key: str) -> None:
        self._key = key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        yield sign(request, self._key)
