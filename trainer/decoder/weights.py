"""The frozen base as the decoder reads it: views of a transformers module's parameters, never copies."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies that do not depend on the length


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """``path`` is the module's path in the base model; ``weight`` is [out, in]."""

    path: str
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer. ``q_norm`` and ``k_norm`` ([head_dim]) exist in Qwen3 alone."""

    input_norm: Tensor
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    gate: Projection
    up: Projection
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
    """Return views of a causal language model, whether or not PEFT has wrapped its linear layers.

    Raises:
        ValueError: the architecture is not supported.
    """
    config = model.config
    if not supports(config):
        raise ValueError(f"the decoder does not support {config.model_type} with this config")
    inner = model.model
    attention = inner.layers[0].self_attn
    head = _projection(model.lm_head, "lm_head")
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
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        input_norm=layer.input_layernorm.weight,
        q=_projection(attention.q_proj, f"{path}.self_attn.q_proj"),
        k=_projection(attention.k_proj, f"{path}.self_attn.k_proj"),
        v=_projection(attention.v_proj, f"{path}.self_attn.v_proj"),
        o=_projection(attention.o_proj, f"{path}.self_attn.o_proj"),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        post_norm=layer.post_attention_layernorm.weight,
        gate=_projection(mlp.gate_proj, f"{path}.mlp.gate_proj"),
        up=_projection(mlp.up_proj, f"{path}.mlp.up_proj"),
        down=_projection(mlp.down_proj, f"{path}.mlp.down_proj"),
    )


def _projection(module: nn.Module, path: str) -> Projection:
    linear = _base(module)
    return Projection(path=path, weight=linear.weight, bias=linear.bias)


def _base(module: nn.Module) -> Any:
    """Return the layer under a PEFT wrapper, or the layer itself."""
    return getattr(module, "base_layer", module)
