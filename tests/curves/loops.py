"""The two loops under comparison. Each trains one LoRA adapter of the same initial values and can be sampled."""

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from gateway.core.catalog import BaseModel
from gateway.core.ids import SessionId
from gateway.core.payloads import ForwardBackward, LossFn, OptimStep
from gateway.core.sessions import LoraConfig as SessionLora
from gateway.core.tensors import Datum, TensorData
from tests.curves.tasks import Example, Rollout
from trainer.adapters import initial_tensors
from trainer.peft_backend import DTYPES, PeftBackend

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 8, 16
SESSION = SessionId("sess-curve")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What both loops share. ``seed`` draws the adapter's first values."""

    model: Path
    dtype: str
    learning_rate: float
    seed: int

    @property
    def lora(self) -> SessionLora:
        return SessionLora(rank=RANK, alpha=ALPHA, train_attn=True, train_mlp=True, train_unembed=False, seed=self.seed)

    @property
    def adam(self) -> OptimStep:
        return OptimStep(learning_rate=self.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)


class Loop(Protocol):
    """``sft_step`` returns the mean loss per trained token before the step."""

    def sft_step(self, batch: Sequence[Example]) -> float: ...

    def policy_step(self, rollouts: Sequence[Rollout]) -> None:
        """One importance-sampling step on the sum over tokens divided by the number of rollouts."""
        ...

    def sampler(self) -> Any:
        """Return a transformers model that computes what the loop has learned."""
        ...


class PlainLoop:
    """transformers + PEFT + AdamW, right-padded minibatches, full logits."""

    def __init__(self, setup: Setup, *, minibatch: int = 16) -> None:
        self._model = _adapted(setup)
        self._minibatch = minibatch
        adam = setup.adam
        self._optimizer = torch.optim.AdamW(
            [p for p in self._model.parameters() if p.requires_grad],
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=0.0,
        )
        _load(self._model, initial_tensors(setup.lora, _targets(self._model)))

    def sft_step(self, batch: Sequence[Example]) -> float:
        trained = sum(len(example.tokens) - 1 - example.silent for example in batch)
        total = 0.0
        self._model.train()
        for start in range(0, len(batch), self._minibatch):
            part = batch[start : start + self._minibatch]
            rows = self._logprobs([example.tokens for example in part])
            loss = -torch.cat([row[example.silent :] for row, example in zip(rows, part, strict=True)]).sum() / trained
            loss.backward()
            total += float(loss.detach())
        self._step()
        return total

    def policy_step(self, rollouts: Sequence[Rollout]) -> None:
        self._model.train()
        for start in range(0, len(rollouts), self._minibatch):
            part = rollouts[start : start + self._minibatch]
            rows = self._logprobs([torch.cat((rollout.prompt, rollout.answer)) for rollout in part])
            terms = [
                -rollout.advantage * torch.exp(row[len(rollout.prompt) - 1 :] - rollout.sampled).sum()
                for row, rollout in zip(rows, part, strict=True)
            ]
            (torch.stack(terms).sum() / len(rollouts)).backward()
        self._step()

    def sampler(self) -> Any:
        return self._model.eval()

    def _logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return ``log p(tokens[t + 1])`` for every t of each sequence."""
        longest = max(len(tokens) for tokens in sequences)
        padded = torch.stack([F.pad(tokens, (0, longest - len(tokens))) for tokens in sequences])
        logits = self._model(input_ids=padded[:, :-1], use_cache=False).logits.float()
        logprobs = logits.log_softmax(-1).gather(2, padded[:, 1:, None]).squeeze(2)
        return [row[: len(tokens) - 1] for row, tokens in zip(logprobs, sequences, strict=True)]

    def _step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class OurLoop:
    """The trainer's backend, driven as the loop drives it; sampled through the adapter it exports."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        config = AutoConfig.from_pretrained(setup.model)
        base = BaseModel(
            name="curve",
            path=setup.model,
            dtype=setup.dtype,
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            max_lora_rank=RANK,
            max_loras=1,
            engines=(),
        )
        self._backend = PeftBackend(base, device=torch.device("cpu"), compute_dtype=setup.dtype)
        self._backend.open(SESSION, setup.lora)
        self._sampler: Any = None

    def sft_step(self, batch: Sequence[Example]) -> float:
        trained = sum(len(example.tokens) - 1 - example.silent for example in batch)
        data: list[Datum] = []
        for example in batch:
            weights = [0.0] * example.silent + [1.0 / trained] * (len(example.tokens) - 1 - example.silent)
            data.append(_datum(example.tokens, weights=weights))
        return self._train(data, LossFn.CROSS_ENTROPY)

    def policy_step(self, rollouts: Sequence[Rollout]) -> None:
        data: list[Datum] = []
        for rollout in rollouts:
            silent = [0.0] * (len(rollout.prompt) - 1)
            advantage = rollout.advantage / len(rollouts)
            data.append(
                _datum(
                    torch.cat((rollout.prompt, rollout.answer)),
                    logprobs=silent + rollout.sampled.tolist(),
                    advantages=silent + [advantage] * len(rollout.answer),
                )
            )
        self._train(data, LossFn.IMPORTANCE_SAMPLING)

    def sampler(self) -> Any:
        if self._sampler is None:
            self._sampler = _adapted(self._setup).eval()
        with tempfile.TemporaryDirectory() as directory:
            self._backend.write_adapter(SESSION, Path(directory))
            set_peft_model_state_dict(self._sampler, load_file(Path(directory) / "adapter_model.safetensors"))
        return self._sampler

    def _train(self, data: Sequence[Datum], loss_fn: LossFn) -> float:
        payload = ForwardBackward(data=tuple(data), loss_fn=loss_fn, loss_fn_config={})
        result = self._backend.forward_backward(SESSION, payload)
        self._backend.optim_step(SESSION, self._setup.adam)
        return result.metrics["loss:sum"]


def _datum(tokens: Tensor, **inputs: list[float]) -> Datum:
    return Datum(
        model_input=TensorData.ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": TensorData.ints(tokens[1:].tolist()),
            **{name: TensorData.floats(values) for name, values in inputs.items()},
        },
    )


def _adapted(setup: Setup) -> Any:
    # In bfloat16 torch's fused attention is several times slower backward, for sequences this short.
    base = AutoModelForCausalLM.from_pretrained(setup.model, dtype=DTYPES[setup.dtype], attn_implementation="eager")
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LINEAR))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        return get_peft_model(base, config)


def _targets(model: Any) -> dict[str, tuple[int, int]]:
    prefix = "base_model.model."
    return {
        path.removeprefix(prefix): (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in LINEAR
    }


def _load(model: Any, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in tensors.items():
            parameters[f"base_model.model.{name}.default.weight"].copy_(value)
