"""The plain computation the decoder is measured against: transformers + PEFT, float32, one datum at a time."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 512
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)
ALL = (*ATTENTION, *MLP, *UNEMBED)


def base(model_type: str, *, tied: bool = True, seed: int = 0, **changes: Any) -> Any:
    """A random two-layer model of an architecture, with norms and biases away from their neutral start."""
    shape = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "initializer_range": 0.1, "tie_word_embeddings": tied,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **{**shape, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A PEFT model and its LoRA parameters; ``lora`` maps the saved names to copies that need a gradient."""

    model: Any
    parameters: Mapping[str, Tensor]
    scale: float

    def lora(self) -> dict[str, Tensor]:
        return {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}

    def logprobs(self, sequence: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        logits = self.model(input_ids=sequence[None], use_cache=False).logits[0].float() / temperature
        chosen = logits.log_softmax(-1).gather(1, target.reshape(len(sequence), -1))
        return chosen.view(target.shape)

    def gradients(
        self,
        sequences: Sequence[Tensor],
        targets: Sequence[Tensor],
        weights: Sequence[Tensor],
        temperature: float = 1.0,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Log-probabilities, and the gradient of ``sum(weights * logprobs)``."""
        self.model.zero_grad(set_to_none=True)
        found: list[Tensor] = []
        for sequence, target, weight in zip(sequences, targets, weights, strict=True):
            logprobs = self.logprobs(sequence, target, temperature)
            (logprobs * weight).sum().backward()
            found.append(logprobs.detach())
        return found, {name: p.grad for name, p in self.parameters.items()}


def adapt(
    model: Any, modules: Sequence[str] = ALL, *, rank: int = 4, alpha: float = 8.0, rslora: bool = False
) -> Plain:
    """Wrap ``model`` in a PEFT adapter whose A and B are both random."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules), use_rslora=rslora)  # pyright: ignore
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # the base is never merged or saved here
        wrapped = get_peft_model(model, config).eval()
    parameters: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(7)
    for name, parameter in wrapped.named_parameters():
        if ".lora_" not in name:
            continue
        parameters[name.replace(".default", "")] = parameter
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    scale = alpha / (rank**0.5 if rslora else rank)
    return Plain(model=wrapped, parameters=parameters, scale=scale)


def random_tokens(seed: int, *lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def shifted(sequences: Sequence[Tensor], seed: int = 99) -> list[Tensor]:
    """Next-token targets; the last one is random."""
    last = random_tokens(seed, len(sequences))[0]
    return [torch.cat((sequence[1:], last[i : i + 1])) for i, sequence in enumerate(sequences)]


def weights_like(targets: Sequence[Tensor], seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(target.shape, generator=generator) for target in targets]


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Relative L2 distance over all tensors together."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(float(expected[n].double().square().sum()) for n in expected)
    return (difference / size) ** 0.5
