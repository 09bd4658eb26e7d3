"""An independent trainer: a two-layer Llama with LoRA and AdamW in plain float64 torch, one process, no batching.

It reads the plan and the base model's files and nothing else, and shares no code with ``trainer/``. Formulas: Llama as
published (RMSNorm, rotary embedding in the half-split form, grouped-query attention, SwiGLU, tied head); LoRA
``W x + alpha / rank * B A x``; decoupled weight decay AdamW with bias correction. A session's first A matrices are the
documented ones: uniform in +-1/sqrt(in) from a generator seeded with sha256("<seed>:<module path>").
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.crash.plan import SessionPlan, Step

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_BETAS = (0.9, 0.95)
_EPS = 1e-12


@dataclass(slots=True, kw_only=True)
class _State:
    """Parameters and moments by name, steps taken, the window's gradient (None: empty) and whether it lacks a part."""

    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    step: int
    window: dict[str, Tensor] | None = None
    broken: bool = False

    def copy(self) -> "_State":
        return _State(
            weights={name: value.clone() for name, value in self.weights.items()},
            first={name: value.clone() for name, value in self.first.items()},
            second={name: value.clone() for name, value in self.second.items()},
            step=self.step,
        )


class ReferenceModel:
    """The frozen base model in float64."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        self.base = {name: value.to(torch.float64) for name, value in tensors.items()}

    def modules(self) -> list[str]:
        """The paths of the adapted layers."""
        return [
            f"model.layers.{layer}.{part}.{name}"
            for layer in range(self.config["num_hidden_layers"])
            for part, names in (("self_attn", ATTENTION), ("mlp", MLP))
            for name in names
        ]

    def logprobs(self, adapter: Mapping[str, Tensor], scale: float, tokens: Sequence[int], targets: Any) -> Tensor:
        """Return the log-probability of each target after the tokens up to it, in nats: ``[T]``."""
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = self.config.get("head_dim") or self.config["hidden_size"] // heads
        x_TH = self.base["model.embed_tokens.weight"][torch.tensor(tokens)]
        length = len(tokens)
        cos, sin = self._rotary(length, size)
        mask = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)

        def linear(path: str, value: Tensor) -> Tensor:
            out = value @ self.base[f"{path}.weight"].T
            if f"{path}.lora_A" in adapter:
                out = out + scale * (value @ adapter[f"{path}.lora_A"].T) @ adapter[f"{path}.lora_B"].T
            return out

        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            h = self._norm(x_TH, f"{at}.input_layernorm.weight")
            q = linear(f"{at}.self_attn.q_proj", h).view(length, heads, size).transpose(0, 1)
            k = linear(f"{at}.self_attn.k_proj", h).view(length, kv_heads, size).transpose(0, 1)
            v = linear(f"{at}.self_attn.v_proj", h).view(length, kv_heads, size).transpose(0, 1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
            attention = (q @ k.transpose(1, 2) / math.sqrt(size) + mask).softmax(dim=-1) @ v
            x_TH = x_TH + linear(f"{at}.self_attn.o_proj", attention.transpose(0, 1).reshape(length, heads * size))
            h = self._norm(x_TH, f"{at}.post_attention_layernorm.weight")
            gate = linear(f"{at}.mlp.gate_proj", h)
            x_TH = x_TH + linear(f"{at}.mlp.down_proj", gate * torch.sigmoid(gate) * linear(f"{at}.mlp.up_proj", h))
        logits = self._norm(x_TH, "model.norm.weight") @ self.base["model.embed_tokens.weight"].T
        return logits.log_softmax(dim=-1).gather(1, torch.tensor(targets)[:, None]).squeeze(1)

    def _norm(self, x: Tensor, weight: str) -> Tensor:
        eps: float = self.config["rms_norm_eps"]
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * self.base[weight]

    def _rotary(self, length: int, size: int) -> tuple[Tensor, Tensor]:
        parameters: dict[str, Any] = self.config.get("rope_parameters") or {}
        theta: float = parameters.get("rope_theta") or self.config.get("rope_theta") or 10000.0
        frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a session must come to: the log-probabilities of its probe, and its adapter at each ``save_weights``."""

    model: ReferenceModel
    scale: float
    probe: list[list[float]]
    saved: Mapping[int, Mapping[str, Tensor]]

    def logprobs(self, after: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the log-probability, in nats, of each of ``tokens`` after ``prompt`` and those before it.

        Under the version that the save at seq ``after`` made, or (0) under the base model.
        """
        text = [*prompt, *tokens]
        with torch.no_grad():
            scores = self.model.logprobs(self.saved[after] if after else {}, self.scale, text[:-1], text[1:])
        return scores[len(prompt) - 1 :].tolist()


class ReferenceTrainer:
    """Applies one session's plan, operation after operation."""

    def __init__(self, model: ReferenceModel, plan: SessionPlan) -> None:
        self._model = model
        self._plan = plan
        self._scale = plan.lora["alpha"] / plan.lora["rank"]
        self._state = self._fresh()
        self._saved: list[_State] = []  # by number in the group

    def run(self) -> Reference:
        """Apply every step; the probe's log-probabilities are one list per datum."""
        weights: dict[int, Mapping[str, Tensor]] = {}
        for step in self._plan.steps[:-1]:
            self.apply(step)
            if step.verb == "save_weights":
                weights[step.seq] = self._saved[-1].weights
        with torch.no_grad():
            probe = [self._logprobs(datum).tolist() for datum in self._plan.probe.body["data"]]
        return Reference(model=self._model, scale=self._scale, probe=probe, saved=weights)

    @property
    def window(self) -> dict[str, Tensor] | None:
        """The gradient that the next step would use; None: there is none."""
        return self._state.window

    def apply(self, step: Step) -> None:
        """Do what ``step`` asks for; one that must fail changes nothing but the window."""
        state = self._state
        match step.verb:
            case "forward_backward" if step.failure is None:
                gradient = self._gradient(step.body)
                window = state.window or {name: torch.zeros_like(value) for name, value in gradient.items()}
                state.window = {name: window[name] + gradient[name] for name in gradient}
            case "forward_backward":
                state.broken = True
            case "optim_step":
                if step.failure is None:
                    self._step(step.body["adam_params"])
                state.window, state.broken = None, False
            case "save_weights" | "save_state":
                self._saved.append(state.copy())
            case "load_state":
                saved = self._saved[int(step.body["version"].rpartition("@")[2]) - 1]
                loaded = saved.copy()
                if not step.body["optimizer"]:
                    fresh = self._fresh()
                    loaded.first, loaded.second, loaded.step = fresh.first, fresh.second, 0
                self._state = loaded
            case _:
                pass  # forward changes nothing

    def _gradient(self, body: Mapping[str, Any]) -> dict[str, Tensor]:
        parameters = {name: value.requires_grad_() for name, value in self._state.weights.items()}
        loss = torch.zeros((), dtype=torch.float64)
        for datum in body["data"]:
            loss = loss + self._loss(datum, body["loss_fn"], self._logprobs(datum))
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        for value in parameters.values():
            value.requires_grad_(False)
        return dict(zip(parameters, gradients, strict=True))

    def _loss(self, datum: Mapping[str, Any], loss_fn: str, logprobs: Tensor) -> Tensor:
        inputs = datum["loss_fn_inputs"]
        if loss_fn == "cross_entropy":
            return -(torch.tensor(inputs["weights"], dtype=torch.float64) * logprobs).sum()
        old = torch.tensor(inputs["logprobs"], dtype=torch.float64)
        return -((logprobs - old).exp() * torch.tensor(inputs["advantages"], dtype=torch.float64)).sum()

    def _logprobs(self, datum: Mapping[str, Any]) -> Tensor:
        targets = datum["loss_fn_inputs"]["target_tokens"]
        return self._model.logprobs(self._state.weights, self._scale, datum["model_input"], targets)

    def _step(self, adam: Mapping[str, float]) -> None:
        state = self._state
        assert state.window is not None
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in state.window.values()))
        clip = adam["grad_clip_norm"]
        shrink = clip / norm if 0 < clip < norm else 1.0
        state.step += 1
        rate, (beta1, beta2) = adam["learning_rate"], _BETAS
        for name, weight in state.weights.items():
            gradient = state.window[name] * shrink
            first = state.first[name] = beta1 * state.first[name] + (1 - beta1) * gradient
            second = state.second[name] = beta2 * state.second[name] + (1 - beta2) * gradient.square()
            decayed = weight * (1 - rate * adam["weight_decay"])
            denominator = (second / (1 - beta2**state.step)).sqrt() + adam.get("eps", _EPS)
            state.weights[name] = decayed - rate * (first / (1 - beta1**state.step)) / denominator

    def _fresh(self) -> _State:
        weights: dict[str, Tensor] = {}
        rank, seed = self._plan.lora["rank"], self._plan.lora["seed"]
        for path in self._model.modules():
            out_features, in_features = self._model.base[f"{path}.weight"].shape
            digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            uniform = torch.rand((rank, in_features), generator=generator)
            weights[f"{path}.lora_A"] = ((uniform * 2 - 1) / math.sqrt(in_features)).to(torch.float64)
            weights[f"{path}.lora_B"] = torch.zeros((out_features, rank), dtype=torch.float64)
        return _State(
            weights=weights,
            first={name: torch.zeros_like(value) for name, value in weights.items()},
            second={name: torch.zeros_like(value) for name, value in weights.items()},
            step=0,
        )
