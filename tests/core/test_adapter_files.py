"""Adapters as files: what PEFT writes is read, and what engines would wrongly accept is refused by name."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.core.adapter_files import CONFIG_NAME, WEIGHTS_NAME, BadAdapter, read_adapter

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
PATH = "model.layers.0.self_attn.q_proj"
SHAPES = {"lora_A": (2, 3), "lora_B": (5, 2)}
FORMATS = {"F32": "f", "F16": "e"}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def tensors(dtype: str = "F32", value: float = 0.5) -> Tensors:
    return {
        f"base_model.model.{PATH}.{side}.weight": (dtype, shape, packed(dtype, [value] * math.prod(shape)))
        for side, shape in SHAPES.items()
    }


def packed(dtype: str, values: list[float]) -> bytes:
    if dtype == "BF16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)


def write(directory: Path, content: Tensors, config: Mapping[str, Any] = CONFIG, *, tail: bytes = b"") -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in content.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in content.values())
    (directory / WEIGHTS_NAME).write_bytes(struct.pack("<Q", len(text)) + text + data + tail)
    (directory / CONFIG_NAME).write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_a_whole_adapter_is_read_in_every_dtype(tmp_path: Path, dtype: str) -> None:
    layout = read_adapter(write(tmp_path, tensors(dtype, value=-1.5)))

    assert (layout.rank, layout.alpha, layout.use_rslora, layout.dtype) == (2, 4.0, False, dtype)
    assert layout.modules == {PATH: (5, 3)}


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_and_its_tensor_named(tmp_path: Path, dtype: str, value: float) -> None:
    content = tensors(dtype)
    name = f"base_model.model.{PATH}.lora_B.weight"
    content[name] = (dtype, (5, 2), packed(dtype, [0.5] * 9 + [value]))

    with pytest.raises(BadAdapter, match="not finite") as refused:
        read_adapter(write(tmp_path, content))
    assert refused.value.field == name


def test_the_largest_finite_numbers_pass(tmp_path: Path) -> None:
    read_adapter(write(tmp_path, tensors("F16", 65504.0)))
    read_adapter(write(tmp_path, tensors("F32", 3.4028234663852886e38)))


def test_swapped_halves_are_refused_with_both_shapes(tmp_path: Path) -> None:
    A, B = tensors().items()
    swapped = {A[0]: B[1], B[0]: A[1]}

    with pytest.raises(BadAdapter, match=r"lora_A \[5, 2\] and lora_B \[2, 3\]"):
        read_adapter(write(tmp_path, swapped))


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.x.lora_A.default.weight",
        "x.lora_A.weight",
        "base_model.model.../x.lora_A.weight",
        "lm_head.bias",
    ],
)
def test_a_tensor_of_another_name_is_refused(tmp_path: Path, name: str) -> None:
    content = {**tensors(), name: ("F32", (2, 3), packed("F32", [0.0] * 6))}

    with pytest.raises(BadAdapter, match="no tensor of a LoRA adapter"):
        read_adapter(write(tmp_path, content))


def test_half_a_pair_and_bytes_that_belong_to_nothing_are_refused(tmp_path: Path) -> None:
    half = dict(list(tensors().items())[:1])
    with pytest.raises(BadAdapter, match="no lora_B"):
        read_adapter(write(tmp_path, half))
    with pytest.raises(BadAdapter, match="holds"):
        read_adapter(write(tmp_path, tensors(), tail=b"more"))


@pytest.mark.parametrize("prefix", [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 5) + b'{"a":'])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, prefix: bytes) -> None:
    write(tmp_path, tensors())
    (tmp_path / WEIGHTS_NAME).write_bytes(prefix)

    with pytest.raises(BadAdapter):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"r": 3}, PATH),
        ({"r": True}, "r"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": ["k_proj"]}, "target_modules"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"something_new": {"a": 1}}, "something_new"),
    ],
)
def test_a_setting_that_engines_would_ignore_or_refuse_is_named(
    tmp_path: Path, changes: Mapping[str, Any], field: str
) -> None:
    with pytest.raises(BadAdapter) as refused:
        read_adapter(write(tmp_path, tensors(), {**CONFIG, **changes}))
    assert refused.value.field == field
