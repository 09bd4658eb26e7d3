"""Four spellings of a version, and what is none of them."""

import pytest

from gateway.core.addresses import Aliased, ById, Named, Numbered, check_alias, check_name, parse_address
from gateway.core.errors import Invalid
from gateway.core.ids import SessionId, VersionId, new_version_id
from gateway.core.versions import VersionKind

ARN = "arn:aws:sagemaker:us-west-2:123456789012:model-package"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("policy@12", Numbered("policy", 12)),
        ("a@1", Numbered("a", 1)),
        (f"{ARN}/policy/12", Numbered("policy", 12)),
        ("arn:aws-us-gov:sagemaker:us-gov-west-1:000000000000:model-package/p/1", Numbered("p", 1)),
        ("policy@champion", Aliased("policy", "champion")),
        ("policy@latest", Aliased("policy", "latest")),
        ("ver-0abc", ById(VersionId("ver-0abc"))),
        ("tinker://sess-1/weights/ck.1", Named(SessionId("sess-1"), VersionKind.STATE, "ck.1")),
        ("tinker://sess-1:train:0/sampler_weights/a", Named(SessionId("sess-1:train:0"), VersionKind.ADAPTER, "a")),
    ],
)
def test_every_spelling_is_read(text: str, address: object) -> None:
    assert parse_address(text) == address


def test_a_new_id_is_an_address() -> None:
    assert isinstance(parse_address(new_version_id()), ById)


@pytest.mark.parametrize(
    "text",
    [
        *("", "policy", "policy@", "policy@0", "policy@01", "policy@-1", "policy@1234567890", "-a@1", "a b@1", "@1"),
        *("a@b@1", "a@\u0661", "a@1b", "a@-b", "a@b c", "../a@1", "a@../b", "a@" + "b" * 64, "policy@12\n"),
        *(f"{ARN}/policy/0", f"{ARN}/policy", f"{ARN}/../1", f"{ARN}/a/b/1", "arn:aws:s3:::bucket"),
        *("tinker://s/weights/..", "tinker://s/weights/a/b", "tinker://s/other/a", "tinker:///weights/a"),
        *("tinker://s/weights/.a", "tinker://../weights/a", "VER-1", "ver-", "ver-a/b"),
    ],
)
def test_nothing_else_is_an_address(text: str) -> None:
    assert parse_address(text) is None


@pytest.mark.parametrize("alias", ["latest", "", "1st", "a b", "a/b", "..", "a" * 64, "\u00e9"])
def test_an_alias_has_a_pattern_and_latest_moves_by_itself(alias: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_alias(alias)
    assert refused.value.field == "alias"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "ver-1", "a" * 129, "a\x00"])
def test_a_name_is_no_path_and_no_id(name: str) -> None:
    with pytest.raises(Invalid):
        check_name(name)
