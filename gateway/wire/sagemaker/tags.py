"""Tags are the owner's labels: a session's or group's ``user_metadata``."""

from collections.abc import Mapping, Sequence

from gateway.core.errors import Invalid
from gateway.wire.sagemaker.models import Document

RESERVED = "aws:"  # the prefix of keys that are not for users


def metadata_of(tags: Sequence[Document]) -> Mapping[str, str]:
    """Return tags by key.

    Raises:
        Invalid: a key comes twice, or is reserved.
    """
    labels: dict[str, str] = {}
    for index, tag in enumerate(tags):
        key: str = tag["Key"]
        if key in labels or key.lower().startswith(RESERVED):
            raise Invalid(
                f"Tags[{index}].Key must be given once and must not start with {RESERVED!r}",
                field=f"Tags[{index}].Key",
            )
        labels[key] = tag["Value"]
    return labels


def tags_of(user_metadata: Mapping[str, str]) -> Sequence[Document]:
    return [{"Key": key, "Value": value} for key, value in user_metadata.items() if not key.startswith(RESERVED)]
