"""What the nodes of a custom loss may compute: functions of torch, by torch's own names, and Python's arithmetic.

An operation is called by one name: ``torch.exp``, ``Tensor.sum`` (a method), ``operator.mul``, ``math.sqrt``,
``getattr``. None of them reaches anything but the loss's own values, draws random numbers, or gives a tensor's element
to Python. The size of a result depends on the sizes and whole numbers given, but for indexing with a mask.
"""

_FUNCTIONS_AND_METHODS = """
    abs acos addcdiv addcmul add all amax amin any argmax argmin argsort asin asinh atan atan2 atanh broadcast_to ceil
    clamp clamp_max clamp_min clip clone copysign cos cosh cummax cummin cumprod cumsum detach diagonal diff digamma div
    divide dot eq erf erfc exp exp2 expm1 flatten flip floor floor_divide fmax fmin fmod frac gather ge greater
    greater_equal gt hypot index_select isclose isfinite isinf isnan isneginf isposinf lerp le less less_equal lgamma
    log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor
    logit logsumexp lt masked_fill matmul max maximum mean median min minimum movedim moveaxis mul multiply mv
    nan_to_num nanmean nansum narrow ne neg negative norm not_equal outer permute positive pow prod quantile ravel
    reciprocal relu remainder reshape roll round rsqrt select sigmoid sign sin sinh softmax sort sqrt square
    squeeze std sub subtract sum swapaxes swapdims tan tanh tile topk transpose tril triu true_divide trunc
    unflatten unsqueeze var where xlogy
"""
_FUNCTIONS = """
    arange broadcast_tensors cat concat full full_like hstack linspace ones ones_like rsub stack vstack zeros zeros_like
    binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity elu gelu hardtanh hinge_embedding_loss
    huber_loss kl_div l1_loss leaky_relu logsigmoid margin_ranking_loss mse_loss normalize pad poisson_nll_loss selu
    silu smooth_l1_loss soft_margin_loss softplus
"""
_METHODS = """
    bool contiguous cpu dim double expand expand_as float int long new_full new_ones new_zeros numel repeat reshape_as
    size t to type_as view view_as
"""
_OPERATORS = "abs add and_ eq floordiv ge getitem gt invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor"
_MATHS = "ceil exp expm1 fabs floor fmod log log10 log1p log2 pow sqrt tanh"

OPERATIONS = frozenset(
    [
        "getattr",
        *(f"torch.{name}" for name in (_FUNCTIONS_AND_METHODS + _FUNCTIONS).split()),
        *(f"Tensor.{name}" for name in (_FUNCTIONS_AND_METHODS + _METHODS).split()),
        *(f"operator.{name}" for name in _OPERATORS.split()),
        *(f"math.{name}" for name in _MATHS.split()),
    ]
)
ATTRIBUTES = frozenset({"T", "device", "dtype", "indices", "mT", "ndim", "shape", "values"})
"""What ``getattr`` may read: of a tensor, or of a result with named parts."""

_OPTIONS = """
    alpha approximate atol beta correction decimals delta descending device diagonal dim dim0 dim1 dims dtype end eps
    equal_nan exponent fill_value full index input keepdim k largest length log_input log_target margin mask max max_val
    memory_format min min_val mode nan neginf negative_slope offset ord other p pos_weight posinf q reduction
    rounding_mode rtol shape shifts size sorted stable start step steps target tensor
    tensor1 tensor2 tensors threshold unbiased value weight x1 x2
"""
OPTIONS = frozenset(_OPTIONS.split())
"""The keyword arguments that a node may give; none that names where a result is written."""

CONSTANTS = {
    "dtype": frozenset({"bool", "float32", "float64", "int32", "int64"}),
    "device": frozenset({"cpu"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format"}),
}
"""The constants of torch that an argument may be, by kind."""
