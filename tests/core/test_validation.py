"""What is refused before an operation exists: every refusal names field, index and limit."""

import math

import pytest

from gateway.core.errors import Invalid
from gateway.core.loss_inputs import MAX_ALTERNATIVES
from gateway.core.payloads import LoadState, LossFn, OptimStep, Payload, SaveState, SaveWeights
from gateway.core.submission import check_payload
from gateway.core.tensors import Datum, DType, TensorData
from gateway.core.validation import MAX_DATUMS, check_tokens
from gateway.core.versions import Labels
from tests.core.builders import MODEL, batch, datum

FLOATS = TensorData.floats([0.1, 0.2, 0.3])
POLICY = {"logprobs": FLOATS, "advantages": FLOATS}


def policy_datum(**inputs: TensorData) -> Datum:
    return Datum(
        model_input=TensorData.ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": TensorData.ints([1, 2, 3]), **POLICY, **inputs},
    )


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CLIP_INPUTS = {"clip_low_threshold": FLOATS, "clip_high_threshold": TensorData.floats([1.0, 2.0, 0.3])}
ZEROS = TensorData.floats([0.0] * 3)


def alternatives(k: int, **inputs: TensorData) -> Datum:
    """A datum of cross_entropy with k targets per position."""
    shape = (3, k)
    return Datum(
        model_input=TensorData.ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": TensorData.ints([7] * 3 * k, shape),
            "weights": TensorData.floats([0.5] * 3 * k, shape),
            **inputs,
        },
    )


def without(name: str) -> Datum:
    return Datum(
        model_input=TensorData.ints([1, 2, 3]),
        loss_fn_inputs={key: value for key, value in datum().loss_fn_inputs.items() if key != name},
    )


@pytest.mark.parametrize(
    "payload",
    [
        batch(datum()),
        batch(datum(list(range(16)))),
        batch(datum([0]), datum([511])),
        batch(*[datum()] * MAX_DATUMS),
        batch(policy_datum(), loss_fn=LossFn.IMPORTANCE_SAMPLING),
        batch(policy_datum(weights=FLOATS), loss_fn=LossFn.PPO, clip_low_threshold=0.2, clip_high_threshold=0.2),
        batch(policy_datum(), loss_fn=LossFn.CISPO, clip_high_threshold=0.0),
        batch(policy_datum(), loss_fn=LossFn.DRO, beta=0.1),
        batch(policy_datum(sequence_ratio_mask=FLOATS), loss_fn=LossFn.GSPO, **CLIP),
        batch(policy_datum(sequence_ratio_mask=FLOATS, **CLIP_INPUTS), loss_fn=LossFn.GSPO),
        batch(policy_datum(sequence_ratio_mask=ZEROS, advantages=ZEROS), loss_fn=LossFn.GSPO, **CLIP),
        batch(policy_datum(**CLIP_INPUTS), loss_fn=LossFn.CISPO),
        batch(policy_datum(ref_log_prob=FLOATS), loss_fn=LossFn.PPO, kl_coef=0.1, temperature=0.5),
        batch(policy_datum(ref_log_prob=FLOATS), policy_datum(), loss_fn=LossFn.IMPORTANCE_SAMPLING),
        batch(datum(temperature=TensorData.floats([0.5])), temperature=2.0),
        batch(datum(temperature=TensorData.floats([0.5, 1.0, 2.0]))),
        batch(datum(), alternatives(2), alternatives(MAX_ALTERNATIVES)),
        OptimStep(),
        OptimStep(learning_rate=0.0, beta1=0.0, beta2=0.999, eps=0.0, weight_decay=1.0, grad_clip_norm=2.0),
        SaveWeights(group="a-1", labels=Labels(description="x" * 1024)),
    ],
)
def test_what_is_right_passes(payload: Payload) -> None:
    check_payload(payload, MODEL)


@pytest.mark.parametrize(
    ("payload", "field", "code"),
    [
        (batch(), "data", "invalid_request"),
        (batch(*[datum()] * (MAX_DATUMS + 1)), "data", "invalid_request"),
        (batch(datum(), datum([])), "data[1].model_input", "invalid_request"),
        (batch(datum(list(range(17)))), "data[0].model_input", "context_length_exceeded"),
        (batch(datum([1, 512, 3])), "data[0].model_input[1]", "token_out_of_vocabulary"),
        (batch(datum([1, 2, -1])), "data[0].model_input[2]", "token_out_of_vocabulary"),
        (
            batch(datum(target_tokens=TensorData.ints([1, 2, 512]))),
            "data[0].loss_fn_inputs.target_tokens[2]",
            "token_out_of_vocabulary",
        ),
        (batch(datum(), without("weights")), "data[1].loss_fn_inputs.weights", "missing_loss_input"),
        (batch(datum(), loss_fn=LossFn.PPO), "data[0].loss_fn_inputs.logprobs", "missing_loss_input"),
        (batch(datum(advantages=FLOATS)), "data[0].loss_fn_inputs.advantages", "unknown_loss_input"),
        (
            batch(datum(weights=TensorData.ints([1, 1, 1]))),
            "data[0].loss_fn_inputs.weights",
            "invalid_request",
        ),
        (
            batch(datum(weights=TensorData.floats([1.0, 1.0]))),
            "data[0].loss_fn_inputs.weights",
            "length_mismatch",
        ),
        (
            batch(datum(weights=TensorData.floats([1.0, 1.0, 1.0], (3, 1)))),
            "data[0].loss_fn_inputs.weights",
            "length_mismatch",
        ),
        (
            batch(datum(), datum(), datum(weights=TensorData.floats([1.0, math.nan, 1.0]))),
            "data[2].loss_fn_inputs.weights[1]",
            "non_finite",
        ),
        (
            batch(policy_datum(advantages=TensorData.floats([1.0, 1.0, -math.inf])), loss_fn=LossFn.PPO),
            "data[0].loss_fn_inputs.advantages[2]",
            "non_finite",
        ),
        (batch(datum(), temprature=1.0), "loss_fn_config.temprature", "unknown_setting"),
        (batch(datum(), kl_coef=0.1), "loss_fn_config.kl_coef", "unknown_setting"),
        (batch(datum(), temperature=0.0), "loss_fn_config.temperature", "invalid_request"),
        (batch(policy_datum(), loss_fn=LossFn.PPO, beta=0.1), "loss_fn_config.beta", "unknown_setting"),
        (
            batch(policy_datum(), loss_fn=LossFn.PPO, clip_low_threshold=1.3),
            "loss_fn_config.clip_low_threshold",
            "invalid_request",
        ),
        (
            batch(policy_datum(sequence_ratio_mask=FLOATS), loss_fn=LossFn.GSPO, clip_low_threshold=0.8),
            "loss_fn_config.clip_high_threshold",
            "missing_setting",
        ),
        (
            batch(policy_datum(sequence_ratio_mask=ZEROS), loss_fn=LossFn.GSPO, **CLIP),
            "data[0].loss_fn_inputs.sequence_ratio_mask",
            "empty_sequence_mask",
        ),
        (
            batch(policy_datum(), loss_fn=LossFn.GSPO, **CLIP),
            "data[0].loss_fn_inputs.sequence_ratio_mask",
            "missing_loss_input",
        ),
        (
            batch(policy_datum(ref_log_prob=FLOATS), policy_datum(), loss_fn=LossFn.PPO, kl_coef=0.1),
            "data[1].loss_fn_inputs.ref_log_prob",
            "missing_loss_input",
        ),
        (
            batch(policy_datum(clip_low_threshold=TensorData.floats([0.5, 1.5, 0.5])), loss_fn=LossFn.PPO),
            "data[0].loss_fn_inputs.clip_low_threshold[1]",
            "bad_value",
        ),
        (
            batch(policy_datum(clip_high_threshold=TensorData.floats([4.0, 4.0, -0.1])), loss_fn=LossFn.CISPO),
            "data[0].loss_fn_inputs.clip_high_threshold[2]",
            "bad_value",
        ),
        (
            batch(policy_datum(clip_high_threshold=FLOATS), loss_fn=LossFn.DRO),
            "data[0].loss_fn_inputs.clip_high_threshold",
            "unknown_loss_input",
        ),
        (
            batch(datum(temperature=TensorData.floats([0.5, 0.0, 1.0]))),
            "data[0].loss_fn_inputs.temperature[1]",
            "bad_value",
        ),
        (
            batch(datum(temperature=TensorData.floats([0.5, 0.5]))),
            "data[0].loss_fn_inputs.temperature",
            "length_mismatch",
        ),
        (
            batch(datum(), alternatives(MAX_ALTERNATIVES + 1)),
            "data[1].loss_fn_inputs.target_tokens",
            "length_mismatch",
        ),
        (
            batch(datum(target_tokens=TensorData.ints([1] * 6, (3, 2)))),
            "data[0].loss_fn_inputs.weights",
            "length_mismatch",
        ),
        (
            batch(policy_datum(target_tokens=TensorData.ints([1] * 6, (3, 2))), loss_fn=LossFn.PPO),
            "data[0].loss_fn_inputs.target_tokens",
            "length_mismatch",
        ),
        (
            batch(alternatives(2, target_tokens=TensorData.ints([1, 2, 3, 512, 5, 6], (3, 2)))),
            "data[0].loss_fn_inputs.target_tokens[1][1]",
            "token_out_of_vocabulary",
        ),
        (
            batch(alternatives(2, weights=TensorData.floats([1, 1, 1, 1, math.inf, 1], (3, 2)))),
            "data[0].loss_fn_inputs.weights[2][0]",
            "non_finite",
        ),
        (
            batch(policy_datum(), loss_fn=LossFn.PPO, clip_low_threshold=math.nan),
            "loss_fn_config.clip_low_threshold",
            "invalid_request",
        ),
        (
            batch(policy_datum(), loss_fn=LossFn.CISPO, clip_high_threshold=-0.1),
            "loss_fn_config.clip_high_threshold",
            "invalid_request",
        ),
        (OptimStep(learning_rate=-1e-9), "learning_rate", "invalid_request"),
        (OptimStep(learning_rate=math.inf), "learning_rate", "invalid_request"),
        (OptimStep(learning_rate=1e39), "learning_rate", "invalid_request"),
        (OptimStep(learning_rate=1e-3, weight_decay=1e39), "weight_decay", "invalid_request"),
        (OptimStep(learning_rate=1e-3, lora_plus_lr_ratio=1e39), "lora_plus_lr_ratio", "invalid_request"),
        (OptimStep(beta1=1.0), "beta1", "invalid_request"),
        (OptimStep(beta2=math.nan), "beta2", "invalid_request"),
        (OptimStep(eps=-1.0), "eps", "invalid_request"),
        (OptimStep(weight_decay=-0.1), "weight_decay", "invalid_request"),
        (OptimStep(grad_clip_norm=-1.0), "grad_clip_norm", "invalid_request"),
        (OptimStep(lora_plus_lr_ratio=0.0), "lora_plus_lr_ratio", "invalid_request"),
        (OptimStep(lora_plus_lr_ratio=math.inf), "lora_plus_lr_ratio", "invalid_request"),
        (SaveWeights(group="../etc"), "model_package_group", "invalid_request"),
        (SaveWeights(group="-a"), "model_package_group", "invalid_request"),
        (SaveState(group="a" * 64), "model_package_group", "invalid_request"),
        (SaveState(group="a\n"), "model_package_group", "invalid_request"),
        (SaveState(group="a", labels=Labels(description="x" * 1025)), "description", "invalid_request"),
    ],
)
def test_every_refusal_names_its_field(payload: Payload, field: str, code: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_payload(payload, MODEL)

    assert (refused.value.field, refused.value.code) == (field, code)


def test_a_refusal_carries_datum_position_limit_and_what_it_got() -> None:
    with pytest.raises(Invalid) as too_long:
        check_payload(batch(datum(), datum([1] * 17)), MODEL)
    with pytest.raises(Invalid) as outside:
        check_payload(batch(datum(), datum([1, 600])), MODEL)
    with pytest.raises(Invalid) as uneven:
        check_payload(batch(datum(weights=TensorData.floats([1.0]))), MODEL)

    assert too_long.value.details == {"datum": 1, "limit": 16, "got": 17}
    assert outside.value.details == {"datum": 1, "position": 1, "limit": 512}
    assert uneven.value.details == {"datum": 0, "limit": 3, "got": 1}


def test_masked_positions_may_not_hide_a_number_that_is_not_finite() -> None:
    logprobs = TensorData.floats([-0.5, -math.inf, -0.5])
    with pytest.raises(Invalid) as refused:
        check_payload(batch(policy_datum(logprobs=logprobs), loss_fn=LossFn.IMPORTANCE_SAMPLING), MODEL)

    assert refused.value.field == "data[0].loss_fn_inputs.logprobs[1]"


def test_a_load_needs_no_check_of_its_own() -> None:
    check_payload(LoadState(version_id="ver-1", optimizer=True), MODEL)  # pyright: ignore[reportArgumentType]


def test_tokens_are_checked_by_position() -> None:
    check_tokens([], MODEL, field="prompt")
    with pytest.raises(Invalid) as refused:
        check_tokens([0, 511, 512], MODEL, field="prompt")

    assert (refused.value.field, refused.value.details) == ("prompt[2]", {"position": 2, "limit": 512})


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        (DType.FLOAT32, (2,), b"\x00" * 7),
        (DType.INT64, (3,), b"\x00" * 16),
        (DType.INT64, (-1,), b""),
    ],
)
def test_a_tensor_whose_bytes_do_not_fit_its_shape_cannot_exist(
    dtype: DType, shape: tuple[int, ...], data: bytes
) -> None:
    with pytest.raises(Invalid):
        TensorData(dtype=dtype, shape=shape, data=data)


@pytest.mark.parametrize("value", [2**63, 1.5, "a", None])
def test_a_number_that_does_not_fit_its_dtype_is_refused(value: object) -> None:
    with pytest.raises(Invalid):
        TensorData.of([value], DType.INT64)  # pyright: ignore[reportArgumentType]


def test_a_tensor_keeps_its_numbers() -> None:
    tensor = TensorData.ints([-(2**63), 0, 2**63 - 1])

    assert list(tensor.values()) == [-(2**63), 0, 2**63 - 1]
    assert (tensor.size, tensor.first_non_finite(), tensor.first_outside(0, 5)) == (3, None, 0)
    assert TensorData.floats([3e38, 3e38]).first_non_finite() is None
