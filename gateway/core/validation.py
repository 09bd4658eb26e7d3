"""Checks on training data before an operation exists: the error names datum, field, position and limit."""

import math
from collections.abc import Mapping, Sequence

from gateway.core.catalog import BaseModel
from gateway.core.custom_losses import LOGPROBS, CustomLoss
from gateway.core.errors import Invalid
from gateway.core.loss_inputs import (
    CLIP_HIGH,
    CLIP_LOW,
    CLIPPED,
    MAX_ALTERNATIVES,
    OPTIONAL_INPUTS,
    REQUIRED_INPUTS,
    SAMPLER_VERSION,
    check_config,
    clip_bounds,
)
from gateway.core.payloads import Forward, ForwardBackward, LossFn, OptimStep
from gateway.core.tensors import Datum, DType, TensorData

TARGET_TOKENS = "target_tokens"
MAX_DATUMS = 1024
MAX_HYPER_PARAMETER = 1e6  # learning rates and the like far above it take float32 weights out of range in one step


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
    loss_fn, config = payload.loss_fn, payload.loss_fn_config
    if isinstance(loss_fn, CustomLoss) and config:
        raise Invalid("a custom loss has no settings", code="unknown_setting", field="loss_fn_config")
    if not isinstance(loss_fn, CustomLoss):
        check_config(loss_fn, config)
    for index, datum in enumerate(payload.data):
        _check_model_input(datum, index, model)
        if isinstance(loss_fn, CustomLoss):
            _check_custom_inputs(datum, index, loss_fn)
        else:
            _check_inputs(datum, index, loss_fn, config)
        _check_ids(datum.loss_fn_inputs["target_tokens"], f"data[{index}].loss_fn_inputs.target_tokens", model, index)


def check_optim_step(step: OptimStep) -> None:
    """Check the ranges of one step's hyper-parameters.

    Raises:
        Invalid: names the parameter and its range.
    """
    _in_range("learning_rate", step.learning_rate, 0.0, MAX_HYPER_PARAMETER)
    _in_range("beta1", step.beta1, 0.0, 1.0)
    _in_range("beta2", step.beta2, 0.0, 1.0)
    _in_range("eps", step.eps, 0.0, math.inf)
    _in_range("weight_decay", step.weight_decay, 0.0, MAX_HYPER_PARAMETER)
    _in_range("grad_clip_norm", step.grad_clip_norm, 0.0, math.inf)
    if not 0 < step.lora_plus_lr_ratio < MAX_HYPER_PARAMETER:
        raise Invalid(
            f"lora_plus_lr_ratio must be above 0 and below {MAX_HYPER_PARAMETER:g}, got {step.lora_plus_lr_ratio}",
            field="lora_plus_lr_ratio",
        )


def check_tokens(tokens: Sequence[int], model: BaseModel, *, field: str) -> None:
    """Check that every id is in the vocabulary.

    Raises:
        Invalid: ``token_out_of_vocabulary`` names the position, the id and the vocabulary size.
    """
    if tokens and (min(tokens) < 0 or max(tokens) >= model.vocab_size):
        position = next(i for i, token in enumerate(tokens) if not 0 <= token < model.vocab_size)
        raise _out_of_vocabulary(f"{field}[{position}]", tokens[position], model, {"position": position})


def _check_model_input(datum: Datum, index: int, model: BaseModel) -> None:
    where = f"data[{index}]"
    if not 1 <= datum.length <= model.context_length:
        raise Invalid(
            f"{where}.model_input must hold 1 to {model.context_length} tokens, got {datum.length}",
            code="context_length_exceeded" if datum.length else "invalid_request",
            field=f"{where}.model_input",
            details={"datum": index, "limit": model.context_length, "got": datum.length},
        )
    _check_ids(datum.model_input, f"{where}.model_input", model, index)


def _check_inputs(datum: Datum, index: int, loss_fn: LossFn, config: Mapping[str, float]) -> None:
    needed = [*REQUIRED_INPUTS[loss_fn], *(["ref_log_prob"] if config.get("kl_coef", 0.0) > 0 else [])]
    known = [*REQUIRED_INPUTS[loss_fn], *OPTIONAL_INPUTS[loss_fn]]
    _check_names(datum, index, str(loss_fn), needed=needed, known=known)
    _check_clips(datum, index, loss_fn, config)
    for name, tensor in datum.loss_fn_inputs.items():
        field = f"data[{index}].loss_fn_inputs.{name}"
        dtype = REQUIRED_INPUTS[loss_fn].get(name) or OPTIONAL_INPUTS[loss_fn][name]
        if tensor.dtype is not dtype:
            raise Invalid(f"{field} must be {dtype}, got {tensor.dtype}", field=field, details={"datum": index})
        _check_shape(datum, name, index, loss_fn)
        _check_finite(tensor, field, index)
    _check_values(datum, index, loss_fn, config)


def _check_custom_inputs(datum: Datum, index: int, loss: CustomLoss) -> None:
    """Check that the datum has targets and what the loss reads, in the ranks it declares, and nothing else."""
    where, given = f"data[{index}].loss_fn_inputs", datum.loss_fn_inputs
    ranks = {each.name: each.rank for each in loss.inputs if each.name != LOGPROBS}
    names = (TARGET_TOKENS, *ranks)
    _check_names(datum, index, f"the loss {loss.name!r}", needed=names, known=names)
    for name, tensor in given.items():
        rank = loss.inputs[0].rank if name == TARGET_TOKENS else ranks[name]
        if len(tensor.shape) != rank or rank != ranks.get(name, rank):
            raise Invalid(
                f"{where}.{name} must have rank {rank}, as the loss {loss.name!r} declares, got shape "
                f"{list(tensor.shape)}",
                code="length_mismatch",
                field=f"{where}.{name}",
                details={"datum": index, "limit": rank, "got": len(tensor.shape)},
            )
        _check_finite(tensor, f"{where}.{name}", index)
    _check_shape(datum, TARGET_TOKENS, index, LossFn.CROSS_ENTROPY)


def _check_finite(tensor: TensorData, field: str, index: int) -> None:
    if (position := tensor.first_non_finite()) is not None:
        raise _bad_value(field, tensor, position, "is not finite", "non_finite", index)


def _check_names(datum: Datum, index: int, loss: str, *, needed: Sequence[str], known: Sequence[str]) -> None:
    """Check that the datum has every input its loss needs, and no other than it knows."""
    where, given = f"data[{index}].loss_fn_inputs", datum.loss_fn_inputs
    for name in needed:
        if name not in given:
            raise Invalid(
                f"data[{index}]: {loss} needs loss_fn_inputs.{name}",
                code="missing_loss_input",
                field=f"{where}.{name}",
                details={"datum": index},
            )
    for name in given:
        if name not in known:
            raise Invalid(
                f"{loss} has no input {name[:80]!r}; known: {', '.join(known)}",
                code="unknown_loss_input",
                field=f"{where}.{name[:80]}",
                details={"datum": index},
            )


def _check_clips(datum: Datum, index: int, loss_fn: LossFn, config: Mapping[str, float]) -> None:
    """Check that a clipped loss has its thresholds, as a setting or in the datum."""
    if loss_fn in CLIPPED:
        for name, bound in zip((CLIP_LOW, CLIP_HIGH), clip_bounds(loss_fn, config), strict=True):
            if bound is None and name not in datum.loss_fn_inputs:
                raise Invalid(
                    f"{loss_fn} has no published default for {name}: give loss_fn_config.{name}, or an input of that "
                    f"name in every datum; data[{index}] has none",
                    code="missing_setting",
                    field=f"loss_fn_config.{name}",
                    details={"datum": index},
                )


def _check_shape(datum: Datum, name: str, index: int, loss_fn: LossFn) -> None:
    shape, length = datum.loss_fn_inputs[name].shape, datum.length
    field = f"data[{index}].loss_fn_inputs.{name}"
    if name == SAMPLER_VERSION:
        wanted = None if shape == (1,) else "[1]"
    elif shape == (length,) or (name == "temperature" and shape == (1,)):
        wanted = None
    elif loss_fn is LossFn.CROSS_ENTROPY and name == "target_tokens":
        fits = len(shape) == 2 and shape[0] == length and 1 <= shape[1] <= MAX_ALTERNATIVES
        wanted = None if fits else f"[{length}] like model_input, or [{length}, K] with K from 1 to {MAX_ALTERNATIVES}"
    else:
        wanted = f"[{length}] like model_input" + (" or [1]" if name == "temperature" else "")
    if loss_fn is LossFn.CROSS_ENTROPY and name == "weights":
        targets = datum.loss_fn_inputs["target_tokens"].shape
        wanted = None if shape == targets else f"{list(targets)} like target_tokens"
    if wanted is not None:
        raise Invalid(
            f"{field} must have shape {wanted}, got {list(shape)}",
            code="length_mismatch",
            field=field,
            details={
                "datum": index,
                "limit": 1 if name == SAMPLER_VERSION else length,
                "got": datum.loss_fn_inputs[name].size,
            },
        )


def _check_values(datum: Datum, index: int, loss_fn: LossFn, config: Mapping[str, float]) -> None:
    """Check the ranges of temperatures and clip bounds, and that gspo has a sequence to take its ratio over."""
    where, given = f"data[{index}].loss_fn_inputs", datum.loss_fn_inputs
    temperatures = given.get("temperature")
    if temperatures is not None and min(temperatures.values()) <= 0:
        position = next(at for at, value in enumerate(temperatures.values()) if value <= 0)
        raise _bad_value(f"{where}.temperature", temperatures, position, "must be above 0", "bad_value", index)
    sampled_by = given.get(SAMPLER_VERSION)
    if sampled_by is not None and sampled_by.values()[0] < 0:
        raise _bad_value(f"{where}.{SAMPLER_VERSION}", sampled_by, 0, "must not be negative", "bad_value", index)
    low, high = clip_bounds(loss_fn, config)
    if CLIP_LOW in given or CLIP_HIGH in given:
        lows = given[CLIP_LOW].values() if CLIP_LOW in given else [low or 0.0] * datum.length
        highs = given[CLIP_HIGH].values() if CLIP_HIGH in given else [high or 0.0] * datum.length
        for position, (least, most) in enumerate(zip(lows, highs, strict=True)):
            if not 0 <= least <= most:
                name = CLIP_LOW if CLIP_LOW in given else CLIP_HIGH
                wrong = f"must keep 0 <= {CLIP_LOW} <= {CLIP_HIGH}, got {least:g} and {most:g}"
                raise _bad_value(f"{where}.{name}", given[name], position, wrong, "bad_value", index)
    if loss_fn is LossFn.GSPO and any(given["advantages"].values()) and not any(given["sequence_ratio_mask"].values()):
        raise Invalid(
            f"{where}.sequence_ratio_mask is 0 everywhere: the ratio of the sequence has no position to be taken over",
            code="empty_sequence_mask",
            field=f"{where}.sequence_ratio_mask",
            details={"datum": index},
        )


def _bad_value(field: str, tensor: TensorData, position: int, what: str, code: str, index: int) -> Invalid:
    """Return the refusal of the element at a flat ``position``; its place is named in the tensor's own dimensions."""
    indices = _unravel(position, tensor.shape)
    field += "".join(f"[{at}]" for at in indices)
    return Invalid(f"{field} {what}", code=code, field=field, details={"datum": index, "position": indices[0]})


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    indices: list[int] = []
    for extent in reversed(shape):
        position, index = divmod(position, extent)
        indices.insert(0, index)
    return tuple(indices)


def _check_ids(tensor: TensorData, field: str, model: BaseModel, index: int) -> None:
    if tensor.dtype is not DType.INT64:
        raise Invalid(f"{field} must be int64, got {tensor.dtype}", field=field, details={"datum": index})
    if (position := tensor.first_outside(0, model.vocab_size)) is not None:
        token, indices = int(tensor.values()[position]), _unravel(position, tensor.shape)
        place = "".join(f"[{at}]" for at in indices)
        raise _out_of_vocabulary(f"{field}{place}", token, model, {"datum": index, "position": indices[0]})


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
