"""Signature version 4: botocore's own signer recomputes it with the secret that the key id derives.

A key ``tml-ID-SECRET`` is the pair ``AWS_ACCESS_KEY_ID=ID``, ``AWS_SECRET_ACCESS_KEY=SECRET``. The signature covers
method, path, query, the body's hash and the headers it names; those must be all that decide what the request does.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.core.errors import Unauthenticated
from gateway.core.ids import KeyId

MAX_SKEW = timedelta(minutes=5)
SERVICE = "sagemaker"
_ALGORITHM = "AWS4-HMAC-SHA256"
_MOMENT = "%Y%m%dT%H%M%SZ"
_CREDENTIAL = re.compile(r"([0-9a-z]{20})/([0-9]{8})/([a-z0-9-]{1,32})/([a-z0-9-]{1,64})/aws4_request", re.ASCII)
_SIGNATURE = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAMES = re.compile(r"[a-z0-9-]+(?:;[a-z0-9-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """What a request says of its signature."""

    key_id: KeyId
    moment: str
    region: str
    headers: tuple[str, ...]
    signature: str


def read_signature(headers: Headers, *, now: datetime) -> Signed:
    """Return what the ``Authorization`` header says, where it can be true at all.

    Raises:
        Unauthenticated: ``temporary_credentials``, ``incomplete_signature``, ``clock_skew``, or no key of ours.
    """
    if "x-amz-security-token" in headers:
        raise Unauthenticated(
            "temporary credentials are not known here: unset AWS_SESSION_TOKEN, and set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY to the two parts of a Loopline key",
            code="temporary_credentials",
            field="X-Amz-Security-Token",
        )
    parts = _parts(headers.get("authorization", ""))
    moment = headers.get("x-amz-date", "")
    if not {"Credential", "SignedHeaders", "Signature"} <= parts.keys() or not moment:
        raise incomplete("send an Authorization header of signature version 4, and X-Amz-Date")
    credential = _CREDENTIAL.fullmatch(parts["Credential"])
    names, signature = parts["SignedHeaders"], parts["Signature"]
    if credential is None or not _NAMES.fullmatch(names) or not _SIGNATURE.fullmatch(signature):
        raise unknown_caller()
    key_id, day, region, service = credential.groups()
    signed = tuple(names.split(";"))
    unsigned = {"host", *(name for name in headers if name.startswith("x-amz-"))} - set(signed)
    if service != SERVICE or day != moment[:8] or unsigned:
        raise incomplete(
            f"the signature must be for the service {SERVICE} and the day of X-Amz-Date, and must cover Host and every "
            "X-Amz- header"
        )
    _check_moment(moment, now)
    return Signed(
        key_id=KeyId(key_id),
        moment=moment,
        region=region,
        headers=signed,
        signature=signature,
    )


def check_signature(signed: Signed, secret: str, scope: Scope, digest: str) -> None:
    """Raise unless the holder of ``secret`` sent this request, with a body whose SHA-256 is ``digest``.

    Raises:
        Unauthenticated: the same as for a key that does not exist.
    """
    headers = Headers(scope=scope)
    if headers.get("x-amz-content-sha256", digest) != digest:
        raise unknown_caller()
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    url = f"http://host{path.decode('latin-1')}"  # the host that counts is the header's: it is signed
    request = AWSRequest(method=scope["method"], url=f"{url}?{query.decode('latin-1')}" if query else url)
    for name in signed.headers:
        for value in headers.getlist(name):
            request.headers.add_header(name, value)
    signer = _Verifier(signed, secret, digest)
    if not hmac.compare_digest(signer.expected(request), signed.signature):
        raise unknown_caller()


class _Verifier(SigV4Auth):
    """The signer of botocore at a given moment, on a body that is known by its hash."""

    def __init__(self, signed: Signed, secret: str, digest: str) -> None:
        super().__init__(Credentials(signed.key_id, secret), SERVICE, signed.region)
        self._moment = signed.moment
        self._digest = digest

    def payload(self, request: object) -> str:
        return self._digest

    def expected(self, request: AWSRequest) -> str:
        cast("dict[str, Any]", request.context)["timestamp"] = self._moment
        canonical: str = self.canonical_request(request)
        return str(self.signature(self.string_to_sign(request, canonical), request))


def incomplete(message: str) -> Unauthenticated:
    return Unauthenticated(message, code="incomplete_signature", field="Authorization")


def unknown_caller() -> Unauthenticated:
    """Return the one refusal of unknown keys and of signatures that do not fit."""
    return Unauthenticated("the access key id is unknown, or the request was not signed with its secret")


def _parts(authorization: str) -> Mapping[str, str]:
    scheme, _, rest = authorization.partition(" ")
    if scheme != _ALGORITHM:
        return {}
    return {name: value for name, _, value in (part.strip().partition("=") for part in rest.split(","))}


def _check_moment(moment: str, now: datetime) -> None:
    try:
        at = datetime.strptime(moment, _MOMENT).replace(tzinfo=UTC)
    except ValueError:
        raise incomplete("X-Amz-Date must look like 20260131T235959Z") from None
    if abs(at - now) > MAX_SKEW:
        raise Unauthenticated(
            f"the request was signed at {moment}, and it is {now.strftime(_MOMENT)} here: the clocks may differ by "
            f"{MAX_SKEW.seconds} seconds",
            code="clock_skew",
            field="X-Amz-Date",
            details={"limit": MAX_SKEW.seconds},
        )
