"""A payload in the form in which the operation log keeps it."""

import hashlib
from dataclasses import dataclass
from typing import Self

from gateway.core.codec import encode_payload
from gateway.core.payloads import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """``digest`` is the sha256 of ``content``, in hexadecimal."""

    payload: Payload
    content: bytes
    digest: str

    @classmethod
    def of(cls, payload: Payload) -> Self:
        """Encode a payload. A batch may be tens of megabytes: not for the event loop."""
        content = encode_payload(payload)
        return cls(payload=payload, content=content, digest=hashlib.sha256(content).hexdigest())
