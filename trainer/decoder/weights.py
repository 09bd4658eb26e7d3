"""The frozen base as the decoder reads it: the very memory of a transformers module's parameters, never copies.

Linear layers that read the same rows are multiplied as one. Their weights are moved next to each other once, and the
module's parameters become views of that memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies that do not depend on the length


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One linear layer or several that read the same rows, one below the other: ``weight`` is [sum of widths, in].

    ``paths`` are the modules' paths in the base model, ``widths`` their outputs.
    """

    paths: tuple[str, ...]
    widths: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. ``q_norm`` and ``k_norm`` ([head_dim]) exist in Qwen3 alone."""

    input_norm: Tensor
    qkv: Projection
    o: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model. ``inv_freq`` [head_dim / 2] and ``rope_scale`` make cos and sin of a position."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Projection
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    score_scale: float
    inv_freq: Tensor
    rope_scale: float


def supports(config: Any) -> bool:
    """Whether the decoder computes this transformers config exactly; all others take the plain path."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    full_attention = all(kind == "full_attention" for kind in layer_types)
    return bool(
        getattr(config, "model_type", None) in _ARCHITECTURES
        and config.hidden_act == "silu"
        and rope.get("rope_type") in _STATIC_ROPE
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and full_attention
        and not getattr(config, "use_sliding_window", False)
        and getattr(config, "attention_dropout", 0.0) == 0.0
        and getattr(config, "pretraining_tp", 1) == 1
        and getattr(config, "quantization_config", None) is None
    )


def read(model: Any) -> Weights:
    """Return a causal language model's weights, whether or not PEFT has wrapped its linear layers.

    Raises:
        ValueError: the architecture is not supported.
    """
    config = model.config
    if not supports(config):
        raise ValueError(f"the decoder does not support {config.model_type} with this config")
    inner = model.model
    attention = inner.layers[0].self_attn
    head = _projection({"lm_head": model.lm_head})
    if head.bias is not None:
        raise ValueError("the decoder does not support a biased lm_head")
    return Weights(
        embedding=_base(inner.embed_tokens).weight,
        layers=tuple(_layer(layer, f"model.layers.{index}") for index, layer in enumerate(inner.layers)),
        final_norm=inner.norm.weight,
        head=head,
        eps=config.rms_norm_eps,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        score_scale=attention.scaling,
        inv_freq=inner.rotary_emb.inv_freq,
        rope_scale=inner.rotary_emb.attention_scaling,
    )


def _layer(layer: Any, path: str) -> Layer:
    attention = layer.self_attn

    def projection(block: str, *names: str) -> Projection:
        module = getattr(layer, block)
        return _projection({f"{path}.{block}.{name}": getattr(module, name) for name in names})

    return Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=projection("self_attn", "q_proj", "k_proj", "v_proj"),
        o=projection("self_attn", "o_proj"),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=projection("mlp", "gate_proj", "up_proj"),
        down=projection("mlp", "down_proj"),
    )


def _projection(modules: Mapping[str, nn.Module]) -> Projection:
    linears = [_base(module) for module in modules.values()]
    widths = [int(linear.weight.shape[0]) for linear in linears]
    biases = [linear.bias for linear in linears]
    bias = biases[0]
    if len(linears) > 1 and any(each is not None for each in biases):
        pairs = zip(linears, widths, strict=True)
        bias = torch.cat([linear.weight.new_zeros(n) if linear.bias is None else linear.bias for linear, n in pairs])
    weight = _stacked([linear.weight for linear in linears])
    return Projection(paths=tuple(modules), widths=tuple(widths), weight=weight, bias=bias)


def _stacked(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return parameters [out, in] as one tensor; they are views of it afterwards, if they were not before."""
    first = parameters[0]
    if len(parameters) == 1:
        return first
    place = first.storage_offset()
    adjacent = first.is_contiguous()
    for each in parameters:
        same = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        adjacent = adjacent and same and each.is_contiguous() and each.storage_offset() == place
        place += each.numel()
    if adjacent:
        return first.detach().as_strided((sum(len(each) for each in parameters), first.shape[1]), first.stride())
    weight = torch.cat([each.detach() for each in parameters])
    row = 0
    for each in parameters:
        each.data = weight[row : row + len(each)]
        row += len(each)
    return weight


def _base(module: nn.Module) -> Any:
    """Return the layer under a PEFT wrapper, or the layer itself."""
    return getattr(module, "base_layer", module)
