"""Values for the core's tests."""

from pathlib import Path

from gateway.core.catalog import BaseModel
from gateway.core.payloads import ForwardBackward, LossFn
from gateway.core.tensors import Datum, TensorData

MODEL = BaseModel(
    name="tiny",
    path=Path("/models/tiny"),
    dtype="float32",
    vocab_size=512,
    context_length=16,
    max_lora_rank=8,
    max_loras=2,
    engines=("http://127.0.0.1:8101",),
)


def datum(tokens: list[int] | None = None, **inputs: TensorData) -> Datum:
    """A datum that cross entropy accepts; ``inputs`` replace or add loss inputs."""
    ids = [1, 2, 3] if tokens is None else tokens
    return Datum(
        model_input=TensorData.ints(ids),
        loss_fn_inputs={
            "target_tokens": TensorData.ints(ids),
            "weights": TensorData.floats([1.0] * len(ids)),
            **inputs,
        },
    )


def batch(*data: Datum, loss_fn: LossFn = LossFn.CROSS_ENTROPY, **config: float) -> ForwardBackward:
    return ForwardBackward(data=data, loss_fn=loss_fn, loss_fn_config=config)
