"""Our protobuf messages are the SDK's: same fields, numbers and types, whatever the messages are called."""

import re
from pathlib import Path
from typing import Any

import pytest
from tinker.proto import tinker_public_pb2 as theirs

from gateway.wire.tinker import wire_pb2 as ours

NOT_READ = {"override_dimensions", "prompt_alt_tokens"}  # never sent by us, and refused or unused where they come in


def shape(descriptor: Any, seen: tuple[str, ...] = ()) -> dict[int, Any]:
    """Return what decides over the bytes of a message, without names of messages."""
    return {
        field.number: (
            field.name,
            field.type,
            field.is_repeated,
            None
            if field.message_type is None or field.message_type.full_name in seen
            else shape(field.message_type, (*seen, field.message_type.full_name)),
        )
        for field in descriptor.fields
        if field.name not in NOT_READ
    }


@pytest.mark.parametrize("name", ["ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse"])
def test_a_message_has_the_sdks_fields(name: str) -> None:
    assert shape(getattr(ours, name).DESCRIPTOR) == shape(getattr(theirs, name).DESCRIPTOR)


def test_the_enums_have_the_sdks_numbers() -> None:
    assert dict(ours.DType.items()) == dict(theirs.DType.items())
    assert dict(ours.StopReason.items()) == dict(theirs.StopReason.items())


def test_the_module_was_made_from_the_file() -> None:
    source = (Path(ours.__file__).parent / "wire.proto").read_text()
    written = {
        message: sorted(int(number) for number in re.findall(r"= (\d+);", body))
        for message, body in re.findall(r"^message (\w+) \{\n(.*?)^\}", source, re.MULTILINE | re.DOTALL)
    }
    made = {
        name: sorted(field.number for field in descriptor.fields)
        for name, descriptor in ours.DESCRIPTOR.message_types_by_name.items()
    }
    assert written == made
