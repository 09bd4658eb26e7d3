"""Our side of the benchmark: the trainer process's own backend, driven with payloads as they come from the log."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoConfig

from gateway.core.catalog import BaseModel
from gateway.core.ids import SessionId
from gateway.core.payloads import Forward, ForwardBackward, LossFn, OptimStep
from gateway.core.sessions import LoraConfig
from gateway.core.tensors import Datum as WireDatum
from gateway.core.tensors import TensorData
from tests.bench.batches import Batch
from tests.bench.options import name_of
from trainer import snapshots
from trainer.peft_backend import PeftBackend, configure_torch

SESSION = SessionId("sess-bench")
STEP = OptimStep(learning_rate=1e-5)


def base_model(path: Path) -> BaseModel:
    """Return a catalogue entry as ``loopline up`` writes it."""
    config = AutoConfig.from_pretrained(path)
    return BaseModel(
        name="bench",
        path=path,
        dtype="bfloat16",
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        max_lora_rank=32,
        max_loras=4,
        engines=(),
    )


def lora(rank: int = 8, seed: int = 0) -> LoraConfig:
    """Return an adapter on all linear layers, scaled by 2 like the bare loop's."""
    return LoraConfig(rank=rank, alpha=2.0 * rank, train_attn=True, train_mlp=True, train_unembed=False, seed=seed)


class BackendLoop:
    """The backend as the trainer process makes it, with one session or more.

    torch is deterministic while we compute, as in the trainer process, and as torch has it by default afterwards.
    """

    def __init__(self, path: Path, dtype: torch.dtype, threads: int, sessions: int = 1) -> None:
        configure_torch(threads)
        self.backend = PeftBackend(base_model(path), device=torch.device("cpu"), compute_dtype=name_of(dtype))
        self.sessions = [SessionId(f"{SESSION}-{index}") for index in range(sessions)]
        for index, session in enumerate(self.sessions):
            self.backend.open(session, lora(seed=index))
        torch.use_deterministic_algorithms(False)

    def forward_backward(self, payload: ForwardBackward, session: int = 0) -> None:
        torch.use_deterministic_algorithms(True)
        self.backend.forward_backward(self.sessions[session], payload)
        torch.use_deterministic_algorithms(False)

    def optim_step(self, session: int = 0) -> None:
        torch.use_deterministic_algorithms(True)
        self.backend.optim_step(self.sessions[session], STEP)
        torch.use_deterministic_algorithms(False)

    def load(self, values: Mapping[str, Tensor], session: int = 0, rank: int = 8) -> None:
        """Give a session these masters (names as in the bare loop), through the door that a recovery takes."""
        config, name = lora(rank=rank), self.sessions[session]
        self.backend.close(name)
        self.backend.open(name, config)
        fresh = self.backend.state(name)
        weights = {master: values[master] for master in fresh.weights}
        state = snapshots.State(lora=config, weights=weights, moments=fresh.moments, window=None, recent=())
        with TemporaryDirectory() as directory:
            snapshots.write(Path(directory), state)
            self.backend.close(name)
            self.backend.restore(name, config, Path(directory))

    def gradients(self, session: int = 0) -> dict[str, Tensor]:
        """Return the accumulated gradient by master, and end the window."""
        state = self.backend.state(self.sessions[session])
        assert state.window is not None
        found = dict(zip(state.weights, state.window, strict=True))
        self.backend.discard_window(self.sessions[session])
        return found


def payload(batch: Batch) -> ForwardBackward:
    """Return the operation that a client's ``forward_backward`` of this batch becomes."""
    policy = batch.loss == "importance_sampling"
    data: list[WireDatum] = []
    for datum in batch.datums:
        inputs = {"target_tokens": TensorData.ints(datum.targets.tolist())}
        inputs["advantages" if policy else "weights"] = TensorData.floats(datum.weights.tolist())
        if policy:
            inputs["logprobs"] = TensorData.floats(datum.sampled.tolist())
        data.append(WireDatum(model_input=TensorData.ints(datum.tokens.tolist()), loss_fn_inputs=inputs))
    return ForwardBackward(data=tuple(data), loss_fn=LossFn(batch.loss), loss_fn_config={})


def forward(batch: Batch) -> Forward:
    """As ``payload``, without the gradient."""
    whole = payload(batch)
    return Forward(data=whole.data, loss_fn=whole.loss_fn, loss_fn_config=whole.loss_fn_config)
