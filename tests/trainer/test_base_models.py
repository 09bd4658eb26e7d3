"""Base models: the three ways to name one, and what the prepared and the tiny model are."""

import hashlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from tests.tiny_model import FULL_VOCABULARY, build_tiny_model
from trainer.base_models import CATALOGUE, BaseModelUnavailable, PackagedModel, check_chat, main, prepare, resolve


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_catalogue_model_is_bfloat16_llama_with_a_chat_template(smollm_model: Path) -> None:
    config = json.loads((smollm_model / "config.json").read_text())
    with safe_open(smollm_model / "model.safetensors", framework="pt") as tensors:
        dtypes = {str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118
    tokenizer = AutoTokenizer.from_pretrained(str(smollm_model))

    assert (config["model_type"], config["num_hidden_layers"], config["vocab_size"]) == ("llama", 30, FULL_VOCABULARY)
    assert dtypes == {"BF16"}
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.model_max_length) == ("<|im_end|>", 2, 8192)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).endswith("Hi<|im_end|>\n")


def test_plain_text_gets_no_extra_tokens_and_survives_a_round_trip(smollm_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(smollm_model))
    text = "What is 12 + 7?\n\té 你好 🙂"

    tokens = tokenizer(text)["input_ids"]

    assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text


def test_a_prepared_model_is_found_without_its_package(smollm_model: Path) -> None:
    gone = PackagedModel(
        name=smollm_model.name,
        distribution="no-such-distribution",
        requirement="no-such-distribution==1",
        file_suffix=".gguf",
        eos_token="<|im_end|>",
        context_length=8192,
        licence="Apache-2.0",
    )

    assert prepare(gone, smollm_model.parent) == smollm_model


def test_a_missing_package_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = PackagedModel(
        name="absent",
        distribution="no-such-distribution",
        requirement="no-such-distribution==1",
        file_suffix=".gguf",
        eos_token="</s>",
        context_length=16,
        licence="none",
    )

    with pytest.raises(BaseModelUnavailable, match="no-such-distribution==1, which is not installed"):
        prepare(model, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_catalogue_name_wins_over_a_directory_of_that_name(
    smollm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / smollm_model.name).mkdir()
    monkeypatch.chdir(tmp_path)

    assert resolve(smollm_model.name, smollm_model.parent) == smollm_model


def test_a_local_directory_is_used_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny_model), tmp_path / "models") == tiny_model
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("files", "reason"), [([], "has no config.json"), (["config.json"], r"has no \*\.safetensors")]
)
def test_a_directory_that_is_no_model_is_refused(files: list[str], reason: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")

    with pytest.raises(BaseModelUnavailable, match=reason):
        resolve(str(tmp_path), tmp_path)


@pytest.mark.parametrize("model", ["nope", "", "a/b/c", "../x", "org/"])
def test_a_name_of_no_known_form_is_refused_without_asking_the_hub(model: str, tmp_path: Path) -> None:
    with pytest.raises(BaseModelUnavailable):
        resolve(model, tmp_path)


def test_another_end_token_than_the_catalogue_promises_is_refused(tiny_model: Path) -> None:
    with pytest.raises(BaseModelUnavailable, match=r"ends with '<\|im_end\|>', not '</s>'"):
        check_chat(tiny_model, eos_token="</s>")


def test_a_chat_template_that_drops_turns_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}<|im_end|>")

    with pytest.raises(BaseModelUnavailable, match="loses turns"):
        check_chat(tmp_path, eos_token="<|im_end|>")


def test_the_command_prints_the_directory_and_nothing_else(
    smollm_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", smollm_model.name, "--models-dir", str(smollm_model.parent)]) == 0
    assert capsys.readouterr().out == f"{smollm_model}\n"


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "nope", "--models-dir", str(tmp_path)]) == 1
    assert f"neither a catalogue name ({', '.join(CATALOGUE)})" in capsys.readouterr().err


def test_the_tiny_model_depends_on_its_seed_alone(tmp_path: Path) -> None:
    first, again, other = (
        build_tiny_model(tmp_path / name, vocab_size=512, seed=seed)
        for name, seed in [("first", 3), ("again", 3), ("other", 4)]
    )

    assert sha256(first / "model.safetensors") == sha256(again / "model.safetensors")
    assert sha256(first / "model.safetensors") != sha256(other / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "first", "other"]


def test_the_tiny_model_speaks_with_smollm2s_tokenizer(tiny_model: Path, smollm_model: Path) -> None:
    with safe_open(tiny_model / "model.safetensors", framework="pt") as tensors:
        embedding = tensors.get_slice("model.embed_tokens.weight")
        shape, dtype = embedding.get_shape(), embedding.get_dtype()

    assert (shape, dtype) == ([FULL_VOCABULARY, 64], "F32")
    assert sha256(tiny_model / "tokenizer.json") == sha256(smollm_model / "tokenizer.json")
