"""A training operation in the core's words. Pure, but for the model package that a load names."""

import re
from collections.abc import Mapping

from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.loss_inputs import CLIP_HIGH, CLIP_LOW
from gateway.core.payloads import Forward, ForwardBackward, LossFn, OptimStep, Payload, SaveState, SaveWeights
from gateway.core.submission import check_payload
from gateway.core.versions import Labels
from gateway.wire.sagemaker.models import Document
from gateway.wire.sagemaker.tensors import datums_of

_CLIP_RANGES = {CLIP_LOW: (0.0, 1.0), CLIP_HIGH: (1.0, 10.0)}  # bounds of the ratio itself
_POLICY = ("target_tokens", "weights", "logprobs", "advantages")
_NEEDED: Mapping[LossFn, tuple[str, ...]] = {
    LossFn.CROSS_ENTROPY: ("target_tokens", "weights"),
    LossFn.IMPORTANCE_SAMPLING: _POLICY,
    LossFn.PPO: _POLICY,
    LossFn.CISPO: _POLICY,
}
_ADAM = {  # how the hyper-parameters are spelled, and what the SDK sends where its caller says nothing
    "learningRate": ("learning_rate", 1e-4),
    "beta1": ("beta1", 0.9),
    "beta2": ("beta2", 0.999),
    "eps": ("eps", 1e-8),
    "weightDecay": ("weight_decay", 0.01),
    "gradClipNorm": ("grad_clip_norm", 0.0),
    "loraPlusLrRatio": ("lora_plus_lr_ratio", 1.0),
}
_SPELLINGS = {
    "data": "datumList",
    "model_input": "modelInput",
    "loss_fn_inputs": "lossFnInputs",
    "loss_fn_config": "lossFnConfig",
    **{ours: theirs for theirs, (ours, _) in _ADAM.items()},
}
_OURS = re.compile(rf"\b(?:{'|'.join(_SPELLINGS)})(?=$|[\[.\s,:])")


def payload_of(name: str, config: Document, group: str, model: BaseModel) -> Payload:
    """Return the checked payload of an operation other than loadState; saves go to ``group``.

    Raises:
        Invalid: names field, index and limit, as this dialect spells them.
    """
    payload = _payload(name, config, group)
    try:
        check_payload(payload, model)
    except Invalid as error:
        inner = f"{name}.adamParamsConfig" if name == "optimizerStep" else name
        raise _in_their_words(error, f"operationConfig.{inner}") from None
    return payload


def _payload(name: str, config: Document, group: str) -> Payload:
    where = f"operationConfig.{name}"
    labels = Labels(description=config.get("description", ""))
    match name:
        case "forward" | "forwardBackward":
            loss_fn = LossFn(config["lossFnName"])
            data = datums_of(config["datumList"], needed=_NEEDED[loss_fn], field=f"{where}.datumList")
            settings = _settings(config.get("lossFnConfig"), f"{where}.lossFnConfig")
            kind = Forward if name == "forward" else ForwardBackward
            return kind(data=data, loss_fn=loss_fn, loss_fn_config=settings)
        case "optimizerStep":
            return _step(config["adamParamsConfig"], f"{where}.adamParamsConfig")
        case "saveWeights":
            return SaveWeights(group=group, merge=config.get("mergeWeights", False), labels=labels)
        case "saveState":
            return SaveState(group=group, labels=labels)
        case _:
            raise NotImplementedError(name)


def _settings(config: object, field: str) -> Mapping[str, float]:
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise Invalid(f"{field} must be an object", field=field)
    settings: dict[str, float] = {}
    given: dict[str, object] = config  # pyright: ignore[reportUnknownVariableType]
    for key, value in given.items():
        if key not in _CLIP_RANGES:
            known = ", ".join(_CLIP_RANGES)
            raise Invalid(f"{field} has no key {key[:80]!r}; known: {known}", code="unknown_setting", field=field)
        low, high = _CLIP_RANGES[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Invalid(f"{field}.{key} must be a number from {low:g} to {high:g}", field=f"{field}.{key}")
        settings[key] = float(value)
    return settings


def _step(asked: Document, field: str) -> OptimStep:
    if asked["learningRate"] == 0:
        raise Invalid(f"{field}.learningRate must be above 0", field=f"{field}.learningRate")
    return OptimStep(**{ours: asked.get(theirs, default) for theirs, (ours, default) in _ADAM.items()})


def _in_their_words(error: Invalid, where: str) -> Invalid:
    """Return a refusal of the core with this dialect's spelling of what it names."""

    def spelled(text: str) -> str:
        return _OURS.sub(lambda found: _SPELLINGS[found[0]], text)

    field = None if error.field is None else f"{where}.{spelled(error.field)}"
    return Invalid(spelled(error.message), code=error.code, field=field, details=error.details)
