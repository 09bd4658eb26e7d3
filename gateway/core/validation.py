"""Checks on training data before an operation exists: the error names datum, field, position and limit."""

import math
from collections.abc import Mapping, Sequence

from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.payloads import Forward, ForwardBackward, LossFn, OptimStep
from gateway.core.tensors import Datum, DType, TensorData

MAX_DATUMS = 1024

_POLICY_INPUTS: Mapping[str, DType] = {
    "target_tokens": DType.INT64,
    "logprobs": DType.FLOAT32,
    "advantages": DType.FLOAT32,
}
REQUIRED_INPUTS: Mapping[LossFn, Mapping[str, DType]] = {
    LossFn.CROSS_ENTROPY: {"target_tokens": DType.INT64, "weights": DType.FLOAT32},
    LossFn.IMPORTANCE_SAMPLING: _POLICY_INPUTS,
    LossFn.PPO: _POLICY_INPUTS,
    LossFn.CISPO: _POLICY_INPUTS,
}
OPTIONAL_INPUTS: Mapping[LossFn, Mapping[str, DType]] = {
    LossFn.CROSS_ENTROPY: {},
    LossFn.IMPORTANCE_SAMPLING: {"weights": DType.FLOAT32},
    LossFn.PPO: {"weights": DType.FLOAT32},
    LossFn.CISPO: {"weights": DType.FLOAT32},
}
CONFIG_KEYS: Mapping[LossFn, frozenset[str]] = {
    LossFn.CROSS_ENTROPY: frozenset(),
    LossFn.IMPORTANCE_SAMPLING: frozenset(),
    LossFn.PPO: frozenset({"clip_low_threshold", "clip_high_threshold"}),
    LossFn.CISPO: frozenset({"clip_low_threshold", "clip_high_threshold"}),
}


def check_forward(payload: Forward | ForwardBackward, model: BaseModel) -> None:
    """Check a batch against its loss and the base model.

    Raises:
        Invalid: empty or too large batch; a length, dtype, token id or number that is wrong; an input or config key
            the loss does not know, or one it misses.
    """
    if not 1 <= len(payload.data) <= MAX_DATUMS:
        raise Invalid(
            f"data must hold 1 to {MAX_DATUMS} datums, got {len(payload.data)}",
            field="data",
            details={"limit": MAX_DATUMS, "got": len(payload.data)},
        )
    _check_config(payload.loss_fn, payload.loss_fn_config)
    for index, datum in enumerate(payload.data):
        _check_datum(datum, index, payload.loss_fn, model)


def check_optim_step(step: OptimStep) -> None:
    """Check the ranges of one step's hyper-parameters.

    Raises:
        Invalid: names the parameter and its range.
    """
    _in_range("learning_rate", step.learning_rate, 0.0, math.inf)
    _in_range("beta1", step.beta1, 0.0, 1.0)
    _in_range("beta2", step.beta2, 0.0, 1.0)
    _in_range("eps", step.eps, 0.0, math.inf)
    _in_range("weight_decay", step.weight_decay, 0.0, math.inf)
    _in_range("grad_clip_norm", step.grad_clip_norm, 0.0, math.inf)


def check_tokens(tokens: Sequence[int], model: BaseModel, *, field: str) -> None:
    """Check that every id is in the vocabulary.

    Raises:
        Invalid: ``token_out_of_vocabulary`` names the position, the id and the vocabulary size.
    """
    if tokens and (min(tokens) < 0 or max(tokens) >= model.vocab_size):
        position = next(i for i, token in enumerate(tokens) if not 0 <= token < model.vocab_size)
        raise _out_of_vocabulary(f"{field}[{position}]", tokens[position], model, {"position": position})


def _check_config(loss_fn: LossFn, config: Mapping[str, float]) -> None:
    for key, value in config.items():
        field = f"loss_fn_config.{key}"
        if key not in CONFIG_KEYS[loss_fn]:
            known = ", ".join(sorted(CONFIG_KEYS[loss_fn])) or "none"
            raise Invalid(f"{loss_fn} has no setting {key[:80]!r}; known: {known}", code="unknown_setting", field=field)
        if not math.isfinite(value) or value < 0:
            raise Invalid(f"{field} must be finite and not negative, got {value}", field=field)


def _check_datum(datum: Datum, index: int, loss_fn: LossFn, model: BaseModel) -> None:
    where = f"data[{index}]"
    details = {"datum": index}
    if not 1 <= datum.length <= model.context_length:
        raise Invalid(
            f"{where}.model_input must hold 1 to {model.context_length} tokens, got {datum.length}",
            code="context_length_exceeded" if datum.length else "invalid_request",
            field=f"{where}.model_input",
            details={**details, "limit": model.context_length, "got": datum.length},
        )
    _check_ids(datum.model_input, f"{where}.model_input", model, index)
    required, optional = REQUIRED_INPUTS[loss_fn], OPTIONAL_INPUTS[loss_fn]
    for name in required:
        if name not in datum.loss_fn_inputs:
            raise Invalid(
                f"{where}: {loss_fn} needs loss_fn_inputs.{name}",
                code="missing_loss_input",
                field=f"{where}.loss_fn_inputs.{name}",
                details=details,
            )
    for name, tensor in datum.loss_fn_inputs.items():
        field = f"{where}.loss_fn_inputs.{name}"
        dtype = required.get(name) or optional.get(name)
        if dtype is None:
            raise Invalid(
                f"{loss_fn} has no input {name[:80]!r}; known: {', '.join([*required, *optional])}",
                code="unknown_loss_input",
                field=field,
                details=details,
            )
        if tensor.dtype is not dtype:
            raise Invalid(f"{field} must be {dtype}, got {tensor.dtype}", field=field, details=details)
        if tensor.shape != (datum.length,):
            raise Invalid(
                f"{field} must have shape [{datum.length}] like model_input, got {list(tensor.shape)}",
                code="length_mismatch",
                field=field,
                details={**details, "limit": datum.length, "got": tensor.size},
            )
        if (position := tensor.first_non_finite()) is not None:
            raise Invalid(
                f"{field}[{position}] is not finite",
                code="non_finite",
                field=f"{field}[{position}]",
                details={**details, "position": position},
            )
    _check_ids(datum.loss_fn_inputs["target_tokens"], f"{where}.loss_fn_inputs.target_tokens", model, index)


def _check_ids(tensor: TensorData, field: str, model: BaseModel, index: int) -> None:
    if tensor.dtype is not DType.INT64:
        raise Invalid(f"{field} must be int64, got {tensor.dtype}", field=field, details={"datum": index})
    if (position := tensor.first_outside(0, model.vocab_size)) is not None:
        token = int(tensor.values()[position])
        raise _out_of_vocabulary(f"{field}[{position}]", token, model, {"datum": index, "position": position})


def _out_of_vocabulary(field: str, token: int, model: BaseModel, details: Mapping[str, int]) -> Invalid:
    return Invalid(
        f"{field} is {token}; {model.name} has token ids 0 to {model.vocab_size - 1}",
        code="token_out_of_vocabulary",
        field=field,
        details={**details, "limit": model.vocab_size},
    )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value and (value < high or high == math.inf)):
        bound = f"from {low:g}" + ("" if high == math.inf else f" to below {high:g}")
        raise Invalid(f"{name} must be a finite number {bound}, got {value}", field=name)
