"""What each loss takes: its inputs with their dtypes, its settings, and the published defaults.

Every input is per position, shape ``[N]`` like ``model_input``, but for three: ``target_tokens`` and ``weights`` of
cross_entropy may be ``[N, K]`` (K alternatives per position), ``temperature`` may be one number for the datum, and
``sampler_version`` (which version sampled it, for the report of staleness) is one number.
"""

import math
from collections.abc import Mapping

from gateway.core.errors import Invalid
from gateway.core.payloads import LossFn
from gateway.core.tensors import DType

MAX_ALTERNATIVES = 64  # K of [N, K] targets

CLIP_DEFAULTS: Mapping[LossFn, tuple[float, float]] = {  # absolute bounds of the ratio; gspo has none published
    LossFn.PPO: (0.8, 1.2),
    LossFn.CISPO: (0.0, 4.0),  # one-sided: the ratio is only bounded from above
}
CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
SAMPLER_VERSION = "sampler_version"
CLIPPED = frozenset({LossFn.PPO, LossFn.CISPO, LossFn.GSPO})
DEFAULT_BETA = 0.05

_POLICY_INPUTS: Mapping[str, DType] = {
    "target_tokens": DType.INT64,
    "logprobs": DType.FLOAT32,
    "advantages": DType.FLOAT32,
}
_POLICY_OPTIONS: Mapping[str, DType] = {
    "weights": DType.FLOAT32,
    "temperature": DType.FLOAT32,
    "ref_log_prob": DType.FLOAT32,
    SAMPLER_VERSION: DType.INT64,
}
_CLIP_OPTIONS: Mapping[str, DType] = {CLIP_LOW: DType.FLOAT32, CLIP_HIGH: DType.FLOAT32}

REQUIRED_INPUTS: Mapping[LossFn, Mapping[str, DType]] = {
    LossFn.CROSS_ENTROPY: {"target_tokens": DType.INT64, "weights": DType.FLOAT32},
    LossFn.IMPORTANCE_SAMPLING: _POLICY_INPUTS,
    LossFn.PPO: _POLICY_INPUTS,
    LossFn.CISPO: _POLICY_INPUTS,
    LossFn.DRO: _POLICY_INPUTS,
    LossFn.GSPO: {**_POLICY_INPUTS, "sequence_ratio_mask": DType.FLOAT32},
}
OPTIONAL_INPUTS: Mapping[LossFn, Mapping[str, DType]] = {
    LossFn.CROSS_ENTROPY: {"temperature": DType.FLOAT32},
    LossFn.IMPORTANCE_SAMPLING: _POLICY_OPTIONS,
    LossFn.PPO: {**_POLICY_OPTIONS, **_CLIP_OPTIONS},
    LossFn.CISPO: {**_POLICY_OPTIONS, **_CLIP_OPTIONS},
    LossFn.DRO: _POLICY_OPTIONS,
    LossFn.GSPO: {**_POLICY_OPTIONS, **_CLIP_OPTIONS},
}
CONFIG_KEYS: Mapping[LossFn, frozenset[str]] = {
    LossFn.CROSS_ENTROPY: frozenset({"temperature"}),
    LossFn.IMPORTANCE_SAMPLING: frozenset({"temperature", "kl_coef"}),
    LossFn.PPO: frozenset({"temperature", "kl_coef", CLIP_LOW, CLIP_HIGH}),
    LossFn.CISPO: frozenset({"temperature", "kl_coef", CLIP_LOW, CLIP_HIGH}),
    LossFn.DRO: frozenset({"temperature", "kl_coef", "beta"}),
    LossFn.GSPO: frozenset({"temperature", "kl_coef", CLIP_LOW, CLIP_HIGH}),
}


def clip_bounds(loss_fn: LossFn, config: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return the bounds of the ratio that hold where no per-position ones are given; None: there is no default."""
    low, high = CLIP_DEFAULTS.get(loss_fn, (None, None))
    return config.get(CLIP_LOW, low), config.get(CLIP_HIGH, high)


def check_config(loss_fn: LossFn, config: Mapping[str, float]) -> None:
    """Check names and ranges of a loss's settings.

    Raises:
        Invalid: names the setting.
    """
    for key, value in config.items():
        field = f"loss_fn_config.{key}"
        if key not in CONFIG_KEYS[loss_fn]:
            known = ", ".join(sorted(CONFIG_KEYS[loss_fn])) or "none"
            raise Invalid(f"{loss_fn} has no setting {key[:80]!r}; known: {known}", code="unknown_setting", field=field)
        if not math.isfinite(value) or value < 0:
            raise Invalid(f"{field} must be finite and not negative, got {value}", field=field)
    if config.get("temperature", 1.0) == 0:
        raise Invalid("loss_fn_config.temperature must be above 0", field="loss_fn_config.temperature")
    low, high = clip_bounds(loss_fn, config)
    if loss_fn in CLIPPED and low is not None and high is not None and low > high:
        raise Invalid(
            f"loss_fn_config.{CLIP_LOW} is {low}, above {CLIP_HIGH} {high}", field=f"loss_fn_config.{CLIP_LOW}"
        )
