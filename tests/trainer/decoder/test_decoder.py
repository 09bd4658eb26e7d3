"""The decoder against transformers + PEFT in float32: every architecture, target set and query shape."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.trainer.decoder.reference import (
    ALL,
    ATTENTION,
    MLP,
    UNEMBED,
    adapt,
    base,
    distance,
    random_tokens,
    shifted,
    weights_like,
)
from trainer.decoder import DecoderSettings, LoraDecoder, PlanSettings, default_compute_dtype, supports
from trainer.decoder.head import Tiling
from trainer.decoder.rows import Kind

SMALL = DecoderSettings(plan=PlanSettings(max_tokens=64, min_saved_tokens=8), tiling=Tiling(rows=16, entries=200))


def run(
    decoder: LoraDecoder, plain: Any, sequences: Sequence[Tensor], targets: Sequence[Tensor], weights: Sequence[Tensor],
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:  # fmt: skip
    lora = plain.lora()
    logprobs = decoder.logprobs(sequences, targets, lora, plain.scale, **options)
    sum((lp * w).sum() for lp, w in zip(logprobs, weights, strict=True)).backward()  # pyright: ignore
    return [lp.detach() for lp in logprobs], {name: tensor.grad for name, tensor in lora.items()}


def check(
    plain: Any, decoder: LoraDecoder, sequences: Sequence[Tensor], targets: Sequence[Tensor], temperature: float = 1.0
) -> None:
    weights = weights_like(targets)
    expected, expected_grad = plain.gradients(sequences, targets, weights, temperature)
    found, found_grad = run(decoder, plain, sequences, targets, weights, temperature=temperature)
    for have, want in zip(found, expected, strict=True):
        assert have.shape == want.shape
        assert float((have - want).abs().max()) < 1e-5
    assert distance(found_grad, expected_grad) < 1e-5


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_equals_peft_on_every_architecture(model_type: str, tied: bool) -> None:
    plain = adapt(base(model_type, tied=tied))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(1, 5, 23, 17, 1, 40)
    check(plain, decoder, sequences, shifted(sequences))


@pytest.mark.parametrize(
    "modules",
    [ATTENTION, MLP, UNEMBED, ATTENTION + MLP, ATTENTION + UNEMBED, MLP + UNEMBED, ALL, ("v_proj", "up_proj")],
    ids="-".join,
)
def test_equals_peft_for_every_set_of_targets(modules: tuple[str, ...]) -> None:
    plain = adapt(base("llama"), modules)
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(2, 12, 30)
    check(plain, decoder, sequences, shifted(sequences))


def test_equals_peft_with_biases_everywhere() -> None:
    plain = adapt(base("llama", attention_bias=True, mlp_bias=True))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(3, 20, 9)
    check(plain, decoder, sequences, shifted(sequences))


def test_equals_peft_with_scaled_rotary_frequencies() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    plain = adapt(base("llama", rope_parameters=rope))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(4, 50)
    check(plain, decoder, sequences, shifted(sequences))


def test_equals_peft_with_rslora_scale() -> None:
    plain = adapt(base("qwen3"), rank=16, rslora=True)
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(5, 31)
    check(plain, decoder, sequences, shifted(sequences))


def test_equals_peft_at_another_temperature() -> None:
    plain = adapt(base("llama"))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(6, 18, 18)
    check(plain, decoder, sequences, shifted(sequences), temperature=0.7)


def test_equals_peft_for_alternatives_per_position() -> None:
    plain = adapt(base("llama"))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(7, 14, 25)
    targets = [tokens.view(-1, 5) for tokens in random_tokens(8, 14 * 5, 25 * 5)]
    targets[0][3] = targets[0][3, 0]  # the same token five times
    check(plain, decoder, sequences, targets)


@pytest.mark.parametrize("attention", ["matmul", "fused"])
def test_equals_peft_on_sequences_longer_than_an_attention_chunk(attention: Kind) -> None:
    plain = adapt(base("qwen2"))
    settings = replace(SMALL, attention=attention)
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=settings)
    sequences = random_tokens(9, 700)
    check(plain, decoder, sequences, shifted(sequences))


def test_recomputing_layers_gives_equal_bits() -> None:
    plain = adapt(base("qwen3"))
    model = plain.model.get_base_model()
    sequences = random_tokens(10, 40, 33, 21)
    targets = shifted(sequences)
    results = []
    for budget in (1 << 30, 0):
        decoder = LoraDecoder(model, compute_dtype=torch.float32, settings=DecoderSettings(activation_bytes=budget))
        results.append(run(decoder, plain, sequences, targets, weights_like(targets)))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_two_runs_give_equal_bits() -> None:
    plain = adapt(base("llama"))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    other = random_tokens(12, 61, 3, 44)
    sequences = random_tokens(11, 20, 37, 8)
    targets = shifted(sequences)
    first = run(decoder, plain, sequences, targets, weights_like(targets))
    run(decoder, plain, other, shifted(other), weights_like(other))  # another operation in between changes nothing
    second = run(decoder, plain, sequences, targets, weights_like(targets))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_forward_alone_gives_the_bits_of_training_whatever_needs_a_gradient() -> None:
    plain = adapt(base("llama"))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(13, 20, 37, 8)
    targets = shifted(sequences)
    with torch.no_grad():
        alone = decoder.logprobs(sequences, targets, plain.lora(), plain.scale)
    assert not any(lp.requires_grad for lp in alone)
    trained = decoder.logprobs(sequences, targets, plain.lora(), plain.scale)
    some = [torch.arange(len(s)) % 3 == 0 for s in sequences]
    partly = decoder.logprobs(sequences, targets, plain.lora(), plain.scale, need_grad_positions=some)
    for a, b, c in zip(alone, trained, partly, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_gradients_where_needed_equal_gradients_everywhere() -> None:
    plain = adapt(base("llama"))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(14, 40, 37)
    targets = shifted(sequences)
    need = [torch.arange(len(s)) % 4 == 1 for s in sequences]
    weights = [w * n for w, n in zip(weights_like(targets), need, strict=True)]
    _, everywhere = run(decoder, plain, sequences, targets, weights)
    _, needed = run(decoder, plain, sequences, targets, weights, need_grad_positions=need)
    assert distance(needed, everywhere) < 1e-6


def test_a_gradient_outside_the_needed_positions_is_refused() -> None:
    plain = adapt(base("llama"))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=SMALL)
    sequences = random_tokens(15, 6)
    targets = shifted(sequences)
    need = [torch.tensor([True, True, False, True, True, True])]
    with pytest.raises(ValueError, match="outside need_grad_positions"):
        run(decoder, plain, sequences, targets, weights_like(targets), need_grad_positions=need)


def test_neighbours_in_a_batch_do_not_leak() -> None:
    plain = adapt(base("llama"))
    settings = DecoderSettings(plan=PlanSettings(max_tokens=512))
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=settings)
    watched, *before = random_tokens(16, 33, 30, 28, 35)
    after = random_tokens(17, 30, 28, 35)
    runs = []
    for others in (before, after):
        sequences = [watched, *others]
        targets = [*shifted([watched]), *shifted(others)]
        weights = [weights_like(targets)[0], *(torch.zeros(len(s)) for s in others)]
        assert len(decoder.plan(sequences)) == 1
        runs.append(run(decoder, plain, sequences, targets, weights))
    assert float((runs[0][0][0] - runs[1][0][0]).abs().max()) < 1e-6
    assert distance(runs[0][1], runs[1][1]) < 1e-6


def test_bfloat16_follows_float32() -> None:
    plain = adapt(base("llama", initializer_range=0.02))
    sequences = random_tokens(18, 30, 50)
    targets = shifted(sequences)
    _, expected = plain.gradients(sequences, targets, weights_like(targets))
    masters = plain.lora()
    model = plain.model.get_base_model().to(torch.bfloat16)
    decoder = LoraDecoder(model, compute_dtype=torch.bfloat16, settings=SMALL)
    logprobs = decoder.logprobs(sequences, targets, masters, plain.scale)
    sum((lp * w).sum() for lp, w in zip(logprobs, weights_like(targets), strict=True)).backward()  # pyright: ignore
    found = {name: tensor.grad for name, tensor in masters.items()}
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert distance(found, expected) < 0.1


def test_frozen_weights_are_not_copied() -> None:
    model = base("llama")
    decoder = LoraDecoder(model, compute_dtype=torch.float32)
    read = decoder.model.weights
    assert read.head.weight.data_ptr() == model.lm_head.weight.data_ptr() == read.embedding.data_ptr()
    layer, attention = read.layers[1], model.model.layers[1].self_attn
    assert layer.down.weight.data_ptr() == model.model.layers[1].mlp.down_proj.weight.data_ptr()
    starts = [0, *accumulate(layer.qkv.widths)]
    for start, module in zip(starts, (attention.q_proj, attention.k_proj, attention.v_proj), strict=False):
        assert layer.qkv.weight[start].data_ptr() == module.weight.data_ptr()
    again = LoraDecoder(model, compute_dtype=torch.float32).model.weights
    assert again.layers[1].qkv.weight.data_ptr() == layer.qkv.weight.data_ptr()


def test_other_compute_dtypes_than_the_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="would need a copy"):
        LoraDecoder(base("llama"), compute_dtype=torch.bfloat16)


def test_an_unknown_lora_tensor_is_refused() -> None:
    decoder = LoraDecoder(base("llama"), compute_dtype=torch.float32)
    tokens = random_tokens(19, 4)
    lora = {f"model.layers.9.self_attn.q_proj.lora_{side}.weight": torch.zeros(4, 64) for side in "AB"}
    with pytest.raises(ValueError, match="layers"):
        decoder.logprobs(tokens, tokens, lora, 1.0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt2", {}),
        ("gemma2", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    ],
)
def test_what_is_computed_otherwise_is_not_supported(model_type: str, changes: dict[str, Any]) -> None:
    assert not supports(AutoConfig.for_model(model_type, **changes))


def test_the_default_dtype_follows_what_the_device_multiplies_in_hardware() -> None:
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        assert default_compute_dtype(torch.device("cpu")) == torch.float32
    assert default_compute_dtype(torch.device("meta")) == torch.float32
