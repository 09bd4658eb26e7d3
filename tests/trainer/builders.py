"""Short makers of trainer inputs, with defaults."""

import random
from collections.abc import Sequence
from pathlib import Path

from gateway.core.catalog import BaseModel
from gateway.core.ids import SessionId
from gateway.core.payloads import Forward, ForwardBackward, LossFn
from gateway.core.sessions import LoraConfig
from gateway.core.tensors import Datum, TensorData

A, B = SessionId("sess-a"), SessionId("sess-b")
VOCAB = 512


def tiny_base(path: Path, *, dtype: str = "float32", name: str = "tiny") -> BaseModel:
    return BaseModel(
        name=name,
        path=path,
        dtype=dtype,
        vocab_size=VOCAB,
        context_length=256,
        max_lora_rank=8,
        max_loras=3,
        engines=(),
    )


def lora(
    *,
    rank: int = 4,
    alpha: float = 8.0,
    attn: bool = True,
    mlp: bool = True,
    unembed: bool = False,
    seed: int = 7,
    rslora: bool = False,
) -> LoraConfig:
    return LoraConfig(
        rank=rank, alpha=alpha, train_attn=attn, train_mlp=mlp, train_unembed=unembed, seed=seed, use_rslora=rslora
    )


def sft_datum(rng: random.Random, length: int) -> Datum:
    tokens = [rng.randrange(VOCAB) for _ in range(length + 1)]
    weights = [rng.choice([0.0, 1.0, 1.0, 0.5, -0.25]) for _ in range(length)]
    return Datum(
        model_input=TensorData.ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": TensorData.ints(tokens[1:]), "weights": TensorData.floats(weights)},
    )


def policy_datum(rng: random.Random, length: int, *, old_logprob: float = -6.0) -> Datum:
    tokens = [rng.randrange(VOCAB) for _ in range(length + 1)]
    return Datum(
        model_input=TensorData.ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData.ints(tokens[1:]),
            "logprobs": TensorData.floats([old_logprob + rng.uniform(-1, 1) for _ in range(length)]),
            "advantages": TensorData.floats([0.0 if i < length // 3 else rng.uniform(-1, 1) for i in range(length)]),
        },
    )


def batch(seed: int, lengths: Sequence[int] = (24, 9, 17, 24)) -> tuple[Datum, ...]:
    rng = random.Random(seed)
    return tuple(sft_datum(rng, length) for length in lengths)


def policy_batch(seed: int, lengths: Sequence[int] = (24, 9, 17, 24)) -> tuple[Datum, ...]:
    rng = random.Random(seed)
    return tuple(policy_datum(rng, length) for length in lengths)


def forward(data: tuple[Datum, ...], loss_fn: LossFn = LossFn.CROSS_ENTROPY, **config: float) -> Forward:
    return Forward(data=data, loss_fn=loss_fn, loss_fn_config=config)


def forward_backward(
    data: tuple[Datum, ...], loss_fn: LossFn = LossFn.CROSS_ENTROPY, **config: float
) -> ForwardBackward:
    return ForwardBackward(data=data, loss_fn=loss_fn, loss_fn_config=config)
