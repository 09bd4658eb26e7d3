"""Files the core reads: the catalogue and manifests."""

from pathlib import Path

import pytest

from gateway.core.canary import TOLERANCES, Canary
from gateway.core.catalog import ENGINE_DTYPES, CatalogError, parse_catalog
from gateway.core.errors import NotFound
from gateway.core.manifest import FileEntry, Manifest, parse_manifest

TABLE = """
[models.tiny]
path = "/models/tiny"
dtype = "float32"
vocab_size = 512
context_length = 128
max_lora_rank = 8
max_loras = 2
engines = ["http://127.0.0.1:8101"]
"""


def test_a_catalogue_lists_its_models() -> None:
    catalog = parse_catalog(TABLE + TABLE.replace("models.tiny", "models.other"))

    assert sorted(catalog.models) == ["other", "tiny"]
    assert catalog.get("tiny").path == Path("/models/tiny")
    assert catalog.get("tiny").engines == ("http://127.0.0.1:8101",)


def test_the_canary_has_a_tolerance_for_every_dtype_of_a_catalogue() -> None:
    assert set(TOLERANCES) == set(ENGINE_DTYPES)


def test_an_unknown_model_names_those_there_are() -> None:
    with pytest.raises(NotFound, match="available: tiny") as refused:
        parse_catalog(TABLE).get("huge")
    assert (refused.value.code, refused.value.field) == ("unknown_base_model", "base_model")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[models", "not TOML"),
        ("[model.tiny]", "model"),
        ("[models.tiny]", "models.tiny: unknown or missing entries"),
        (TABLE + "color = 1\n", "color"),
        (TABLE.replace("512", '"512"'), "models.tiny.vocab_size must be int"),
        (TABLE.replace("512", "true"), "models.tiny.vocab_size must be int"),
        (TABLE.replace('["http://127.0.0.1:8101"]', "[1]"), "engines must be a list of URLs"),
        ("[models]\ntiny = 3", "models.tiny must be a table"),
        (TABLE.replace("float32", "auto"), "models.tiny.dtype must be one of bfloat16, float16, float32, got 'auto'"),
    ],
)
def test_a_wrong_catalogue_says_where(text: str, says: str) -> None:
    with pytest.raises(CatalogError) as refused:
        parse_catalog(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "canary", [None, Canary(tokens=((1, 2),), logprobs=((-0.1,),), base_logprobs=((-1.0000000001,),))]
)
def test_a_manifest_comes_back_equal_from_equal_bytes(canary: Canary | None) -> None:
    manifest = Manifest(
        version_id="ver-1",
        kind="adapter",
        base_model="tiny",
        files={"b": FileEntry(sha256="1" * 64, size_bytes=3), "a": FileEntry(sha256="0" * 64, size_bytes=4)},
        canary=canary,
    )
    text = manifest.to_json()

    assert parse_manifest(text) == manifest
    assert parse_manifest(text).to_json() == text
    assert manifest.size_bytes == 7
