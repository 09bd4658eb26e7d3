"""The lean way through the base model computes what the plain one does, through the whole backend."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from gateway.core.catalog import BaseModel
from gateway.core.payloads import LossFn
from gateway.core.results import ForwardResult
from gateway.core.sessions import LoraConfig
from gateway.core.tensors import Datum, TensorData
from tests.trainer.builders import VOCAB, A, forward_backward, lora, sft_datum
from tests.trainer.states import gradients
from trainer.passes import Passes
from trainer.peft_backend import PeftBackend


def backend_of(base: BaseModel, device: torch.device, *, lean: bool) -> PeftBackend:
    return PeftBackend(base, device=device, compute_dtype="float32", micro_batch_tokens=256, lean=lean)


def group(rng: random.Random, prompt: int, responses: list[int]) -> list[Datum]:
    """Return datums that share their first ``prompt`` tokens and learn on the rest, as GRPO does."""
    shared = [rng.randrange(VOCAB) for _ in range(prompt)]
    made: list[Datum] = []
    for length in responses:
        tokens = shared + [rng.randrange(VOCAB) for _ in range(length)]
        silent = prompt - 1
        trained = len(tokens) - 1 - silent
        made.append(
            Datum(
                model_input=TensorData.ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": TensorData.ints(tokens[1:]),
                    "logprobs": TensorData.floats([0.0] * silent + [rng.uniform(-7, -5) for _ in range(trained)]),
                    "advantages": TensorData.floats([0.0] * silent + [rng.uniform(-1, 1) for _ in range(trained)]),
                },
            )
        )
    return made


def trained_once(backend: PeftBackend, config: LoraConfig, data: list[Datum], loss: LossFn) -> ForwardResult:
    backend.open(A, config)
    return backend.forward_backward(A, forward_backward(tuple(data), loss))


@pytest.mark.parametrize(
    "config",
    [lora(), lora(attn=False, mlp=False, unembed=True), lora(mlp=False), lora(unembed=True, rslora=True)],
    ids=["body", "head", "attention", "all-rslora"],
)
def test_lean_and_plain_agree_on_groups_with_a_shared_prompt(
    base: BaseModel, device: torch.device, config: LoraConfig
) -> None:
    rng = random.Random(3)
    data = [*group(rng, 70, [5, 1, 9, 9]), *group(rng, 66, [3, 4]), *group(rng, 12, [6])]
    rng.shuffle(data)

    lean, plain = backend_of(base, device, lean=True), backend_of(base, device, lean=False)
    fast = trained_once(lean, config, data, LossFn.IMPORTANCE_SAMPLING)
    slow = trained_once(plain, config, data, LossFn.IMPORTANCE_SAMPLING)

    for ours, theirs in zip(fast.outputs, slow.outputs, strict=True):
        assert list(ours["logprobs"].values()) == pytest.approx(list(theirs["logprobs"].values()), abs=1e-5)
    ours, theirs = gradients(lean, A), gradients(plain, A)
    assert theirs.norm() > 0
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_a_temperature_per_datum_is_exact_too(base: BaseModel, device: torch.device) -> None:
    rng = random.Random(4)
    data = [
        Datum(
            model_input=datum.model_input,
            loss_fn_inputs={**datum.loss_fn_inputs, "temperature": TensorData.floats([temperature])},
        )
        for datum, temperature in ((sft_datum(rng, 9), 0.5), (sft_datum(rng, 14), 2.0))
    ]

    lean, plain = backend_of(base, device, lean=True), backend_of(base, device, lean=False)
    fast = trained_once(lean, lora(), data, LossFn.CROSS_ENTROPY)
    slow = trained_once(plain, lora(), data, LossFn.CROSS_ENTROPY)

    assert fast.outputs == slow.outputs


def test_the_way_is_chosen_by_the_operation_alone(base: BaseModel, device: torch.device) -> None:
    backend = backend_of(base, device, lean=True)
    passes: Passes = backend.passes
    rng = random.Random(5)
    plain_data = [sft_datum(rng, 9), sft_datum(rng, 4)]

    assert all(share.tree is not None for share in passes.shares(plain_data))
    assert sorted(row for share in passes.shares(plain_data) for row in share.rows) == [0, 1]


def test_a_session_on_the_lean_way_leaves_the_base_module_unwrapped(
    base: BaseModel, device: torch.device, tmp_path: Path
) -> None:
    backend = backend_of(base, device, lean=True)
    trained_once(backend, lora(), [sft_datum(random.Random(6), 9)], LossFn.CROSS_ENTROPY)

    backend.write_adapter(A, tmp_path)

    assert not [module for module in backend.model.module.modules() if isinstance(module, LoraLayer)]


def test_operations_of_both_ways_in_one_session_add_up(base: BaseModel, device: torch.device) -> None:
    rng = random.Random(7)
    data = [sft_datum(rng, 9), sft_datum(rng, 14)]
    warm = [
        Datum(model_input=d.model_input, loss_fn_inputs={**d.loss_fn_inputs, "temperature": TensorData.floats([1.0])})
        for d in data
    ]
    mixed, lean = backend_of(base, device, lean=True), backend_of(base, device, lean=True)
    trained_once(mixed, lora(), warm, LossFn.CROSS_ENTROPY)
    trained_once(lean, lora(), data, LossFn.CROSS_ENTROPY)
    for backend in (mixed, lean):
        backend.forward_backward(A, forward_backward(tuple(data), LossFn.CROSS_ENTROPY))

    ours, theirs = gradients(mixed, A), gradients(lean, A)
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_an_exact_head_takes_the_heads_rounding_out_of_bfloat16_on_both_ways(base: BaseModel) -> None:
    """On equal hidden states: with nothing but the head in bfloat16 log-probabilities are off by more than 1e-3."""
    data = tuple(group(random.Random(5), 20, [8, 3, 12]))
    coarse = replace(base, dtype="bfloat16")

    def logprobs(*, lean: bool, exact_head: bool) -> list[float]:
        backend = PeftBackend(
            coarse, device=torch.device("cpu"), compute_dtype="bfloat16", lean=lean, exact_head=exact_head
        )
        backend.open(A, lora())
        result = backend.forward_backward(A, forward_backward(data, LossFn.IMPORTANCE_SAMPLING))
        assert result.metrics[f"head_{'float32' if exact_head else 'bfloat16'}:mean"] == 1
        assert result.metrics["compute_bfloat16:mean"] == 1
        return [value for output in result.outputs for value in output["logprobs"].values()]

    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.bfloat16).eval()
    expected: list[float] = []
    with torch.no_grad():
        for datum in data:
            tokens_1T = torch.tensor([datum.model_input.values()])
            hidden_TH = model.base_model(input_ids=tokens_1T).last_hidden_state[0].float()
            scores_TV = (hidden_TH @ model.lm_head.weight.float().T).log_softmax(dim=-1)
            targets_T1 = torch.tensor(datum.loss_fn_inputs["target_tokens"].values())[:, None]
            expected += scores_TV.gather(1, targets_T1)[:, 0].tolist()

    assert logprobs(lean=False, exact_head=True) == pytest.approx(expected, abs=1e-5)
    assert logprobs(lean=False, exact_head=False) != pytest.approx(expected, abs=1e-3)
    assert logprobs(lean=True, exact_head=True) != logprobs(lean=True, exact_head=False)
