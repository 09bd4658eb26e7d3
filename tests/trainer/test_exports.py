"""What leaves the trainer: adapters for engines, canaries, merged models, loaded by the plain libraries."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gateway.core.adapter_files import read_adapter
from gateway.core.adapter_modules import lora_of
from gateway.core.catalog import BaseModel
from gateway.core.sessions import LoraConfig
from tests.tiny_model import tiny_config
from tests.trainer.builders import VOCAB, A, B, batch, forward, forward_backward, lora, tiny_base
from tests.trainer.conftest import make_backend
from tests.trainer.states import weights
from tests.trainer.test_backend import trained
from trainer import stage
from trainer.canary_tokens import fixed, from_sequences
from trainer.peft_backend import PeftBackend

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning:peft")

CONFIGS = {
    "attn-mlp": lora(),
    "attn": lora(mlp=False),
    "mlp": lora(attn=False),
    "attn-unembed": lora(mlp=False, unembed=True),
    "mlp-unembed": lora(attn=False, unembed=True),
    "all-tied": lora(unembed=True),
    "rank-1": lora(rank=1, alpha=2.0, unembed=True),
    "rank-256": lora(rank=256, alpha=256.0, unembed=True),
    "odd-scale": lora(rank=3, alpha=7.0, unembed=True),
    "rslora": lora(rank=3, alpha=3.0, unembed=True, rslora=True),
    "unembed": lora(attn=False, mlp=False, unembed=True),
}


def canary_of(model: torch.nn.Module, tokens: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = model(input_ids=ids[:, :-1]).logits[0].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None]).squeeze(1)


def assert_scores(model: torch.nn.Module, tokens: tuple[tuple[int, ...], ...], expected: object) -> None:
    for sequence, logprobs in zip(tokens, expected, strict=True):  # pyright: ignore
        torch.testing.assert_close(canary_of(model, sequence), torch.tensor(logprobs), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_plain_peft_loads_the_adapter_and_computes_the_canary(
    backend: PeftBackend, base: BaseModel, tmp_path: Path, config: LoraConfig
) -> None:
    backend.open(A, config)
    trained(backend, A)

    canary = backend.write_adapter(A, tmp_path)

    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    assert_scores(model, canary.tokens, canary.base_logprobs)
    adapted = PeftModel.from_pretrained(model, str(tmp_path)).eval()
    assert_scores(adapted, canary.tokens, canary.logprobs)
    differences = [
        abs(a - b)
        for ours, theirs in zip(canary.logprobs, canary.base_logprobs, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert max(differences) > 5e-3


def test_an_adapter_directory_has_the_names_and_dtype_engines_expect(model_dir: Path, tmp_path: Path) -> None:
    backend = make_backend(tiny_base(model_dir, dtype="bfloat16"))
    backend.open(A, lora(unembed=True))
    trained(backend, A)

    backend.write_adapter(A, tmp_path)

    layout = read_adapter(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert (layout.rank, layout.dtype, len(layout.modules)) == (4, "BF16", 2 * 7 + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in tensors
    assert "base_model.model.lm_head.lora_B.weight" in tensors
    assert len(tensors) == 2 * (2 * 7 + 1)
    assert all(tensor.dtype is torch.bfloat16 for tensor in tensors.values())
    config = json.loads((tmp_path / "adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == "tiny"
    assert config["target_modules"] == sorted(config["target_modules"])


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "written", "factor"),
    [
        (4, 8.0, False, 8, 1.0),
        (4, 3.0, False, 4, 0.75),
        (3, 6.0, False, 6, 1.0),
        (3, 7.5, False, 3, 2.5),
        (4, 8.0, True, 16, 1.0),
        (2, 8.0, True, 2, 8.0 / math.sqrt(2)),
    ],
)
def test_only_a_scale_that_engines_apply_exactly_stays_in_the_config(
    rank: int, alpha: float, rslora: bool, written: int, factor: float
) -> None:
    masters = {"x.lora_A": torch.randn(rank, 5), "x.lora_B": torch.randn(6, rank)}

    exported = stage.export(masters, lora(rank=rank, alpha=alpha, rslora=rslora), torch.bfloat16)

    assert exported.alpha == written
    assert torch.equal(exported.tensors["x.lora_A"], masters["x.lora_A"].bfloat16())
    assert torch.equal(exported.tensors["x.lora_B"], (masters["x.lora_B"] * factor).bfloat16())


def damage_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if "lora_B" in name)]


def damage_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name][:1].contiguous()


def damage_nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def damage_unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.other.lora_A.weight"] = torch.zeros(1)


@pytest.mark.parametrize("damage", [damage_missing, damage_shape, damage_nan, damage_unknown])
def test_a_damaged_adapter_does_not_pass(tmp_path: Path, damage) -> None:  # pyright: ignore
    masters = {"x.lora_A": torch.randn(2, 5), "x.lora_B": torch.randn(6, 2)}
    stage.write_adapter(tmp_path, stage.export(masters, lora(rank=2, alpha=2.0), torch.float32), "tiny")
    stage.validate(tmp_path, {"x": (6, 5)}, 2)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")

    with pytest.raises(stage.BadAdapter):
        stage.validate(tmp_path, {"x": (6, 5)}, 2)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("unembed", [True, False], ids=["lm_head", "no-lm_head"])
@pytest.mark.parametrize("shards", ["1GB", "60KB"])
def test_a_merged_model_loads_in_plain_transformers_with_the_same_logprobs(
    tmp_path: Path, tied: bool, unembed: bool, shards: str
) -> None:
    torch.manual_seed(3)
    source, target = tmp_path / "base", tmp_path / "merged"
    config = LlamaConfig(**{**tiny_config(VOCAB).to_dict(), "tie_word_embeddings": tied})
    LlamaForCausalLM(config).save_pretrained(source, max_shard_size=shards)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    backend = make_backend(tiny_base(source))
    backend.open(A, lora(rank=3, alpha=7.0, unembed=unembed, rslora=unembed))
    trained(backend, A)
    target.mkdir()

    backend.write_merged(A, target)

    (target / "adapter").mkdir()
    canary = backend.write_adapter(A, target / "adapter")
    model, loading = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_scores(model.eval(), canary.tokens, canary.logprobs)
    assert {"tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= {
        path.name for path in target.iterdir()
    }
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (tied and not unembed)


def test_a_canary_is_made_of_the_ends_of_recent_sequences(backend: PeftBackend, tmp_path: Path) -> None:
    backend.open(A, lora())
    data = batch(1, lengths=(80, 40, 40, 40, 40, 40))
    backend.forward_backward(A, forward_backward(data))
    backend.forward(A, forward(batch(2)))

    canary = backend.write_adapter(A, tmp_path)

    assert canary.tokens[0] == tuple(data[0].model_input.values())[-64:]
    assert [len(tokens) for tokens in canary.tokens] == [64, 40, 40, 40]
    assert [len(logprobs) for logprobs in canary.logprobs] == [63, 39, 39, 39]


def test_short_sequences_are_joined_and_a_session_without_any_has_a_fixed_canary(
    backend: PeftBackend, tmp_path: Path
) -> None:
    rng = random.Random(0)
    short = [[rng.randrange(VOCAB) for _ in range(10)] for _ in range(9)]
    assert [len(tokens) for tokens in from_sequences(short)] == [40, 40]
    assert from_sequences([[1]]) == ()
    assert from_sequences([[1, 2, 3]]) == ((1, 2, 3),)
    backend.open(A, lora())

    assert backend.write_adapter(A, tmp_path).tokens == fixed(VOCAB, 256)
    assert all(0 <= token < VOCAB for sequence in fixed(VOCAB, 256) for token in sequence)


@pytest.mark.parametrize(
    "config", [lora(unembed=True), lora(rank=3, alpha=7.5), lora(rank=3, alpha=3.0, unembed=True, rslora=True)]
)
def test_an_adapter_that_left_and_came_back_is_the_same_to_the_last_bit(
    backend: PeftBackend, tmp_path: Path, config: LoraConfig
) -> None:
    left, back = tmp_path / "left", tmp_path / "back"
    left.mkdir()
    back.mkdir()
    backend.open(A, config)
    trained(backend, A)
    backend.write_adapter(A, left)
    guest = lora_of(read_adapter(left), seed=9)
    backend.open(B, guest)

    canary = backend.write_imported(B, left, back)

    assert load_file(back / "adapter_model.safetensors").keys() == load_file(left / "adapter_model.safetensors").keys()
    for name, tensor in load_file(left / "adapter_model.safetensors").items():
        assert torch.equal(load_file(back / "adapter_model.safetensors")[name], tensor)
    assert backend.load_adapter(B, back).optimizer_step == 0
    assert backend.write_adapter(B, tmp_path).logprobs == canary.logprobs
    backend.open("sess-own", config)  # pyright: ignore
    backend.load_adapter("sess-own", left)  # pyright: ignore
    torch.testing.assert_close(weights(backend, "sess-own"), weights(backend, A), rtol=1e-6, atol=1e-7)  # pyright: ignore


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning")
def test_a_plain_peft_adapter_of_two_modules_is_imported_and_computes_the_same(
    backend: PeftBackend, base: BaseModel, tmp_path: Path
) -> None:
    source, target = tmp_path / "peft", tmp_path / "ours"
    target.mkdir()
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    config = PeftLoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(str(source))
    backend.open(A, lora_of(read_adapter(source), seed=1))

    canary = backend.write_imported(A, source, target)

    assert_scores(adapted.eval(), canary.tokens, canary.logprobs)
    assert {path.rpartition(".")[2] for path in read_adapter(target).modules} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    backend.load_adapter(A, target)
    trained(backend, A)


def test_an_adapter_of_another_base_model_is_refused_by_module(backend: PeftBackend, tmp_path: Path) -> None:
    for path, shapes, reason in (
        ("model.layers.7.self_attn.q_proj", (64, 64), "no module model.layers.7"),
        ("model.layers.0.self_attn.q_proj", (64, 63), "inputs in the base model"),
        ("model.layers.0.self_attn.q_proj", (63, 64), "outputs in the base model"),
    ):
        shape = (shapes[0], shapes[1])
        masters = {f"{path}.lora_A": torch.randn(2, shape[1]), f"{path}.lora_B": torch.randn(shape[0], 2)}
        stage.write_adapter(tmp_path, stage.export(masters, lora(rank=2, alpha=2.0), torch.float32), "other")
        guest = lora_of(read_adapter(tmp_path), seed=1)
        backend.open(A, guest)
        with pytest.raises(stage.UnfitAdapter, match=reason):
            backend.write_imported(A, tmp_path, tmp_path)
        backend.close(A)
