"""The real backend: torch and PEFT, many sessions on one frozen base model.

The base computes in the compute dtype; masters, gradients, moments and everything after the head's product are float32.
There is no dropout and no other randomness after a session's first tensors. Suffixes as in ``batching``.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gateway.core.canary import Canary
from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.ids import SessionId
from gateway.core.payloads import Forward, ForwardBackward, OptimStep
from gateway.core.results import ForwardResult, OptimStepResult
from gateway.core.sessions import LoraConfig
from gateway.core.tensors import TensorData
from trainer import canary_tokens, merge, optim, snapshots, stage
from trainer.adapters import AdapterBank
from trainer.backend import CorruptState, Loaded
from trainer.batching import MicroBatch, assemble, to_data
from trainer.decoder import default_compute_dtype
from trainer.language_model import LanguageModel
from trainer.losses import fills, kl_weights, token_losses, trained_positions
from trainer.metrics import Report
from trainer.passes import Passes
from trainer.progress import Note, unnoted
from trainer.tenants import Tenant

_CANARY_ADAPTER = "canary"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def configure_torch(threads: int) -> None:
    """Make torch deterministic, process-wide. Call it in the thread that computes, before anything else.

    Equal thread counts on equal machines give equal bits; that is what recovery by replay stands on.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # nothing here reads memory before writing it
    torch.set_float32_matmul_precision("highest")


def pick_device(wanted: str) -> torch.device:
    """Return the device; ``auto`` takes the first CUDA device when there is one."""
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def pick_dtype(base: BaseModel, device: torch.device) -> torch.dtype:
    """Return the engine's dtype where the device multiplies it in hardware, else float32: faster there, and finer."""
    fast = default_compute_dtype(device)
    return fast if fast == torch.float32 else DTYPES[base.dtype]


class PeftBackend:
    """``TrainingBackend`` on torch.

    ``compute_dtype`` None takes ``pick_dtype``; ``micro_batch_tokens`` bounds the tokens computed at once; with
    ``lean`` False plain transformers + PEFT computes also what the lean decoder could.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        device: torch.device,
        compute_dtype: str | None,
        micro_batch_tokens: int = 2048,
        lean: bool = True,
    ) -> None:
        self._base = base
        self._device = device
        dtype = DTYPES[compute_dtype] if compute_dtype else pick_dtype(base, device)
        self.model = LanguageModel(base.path, dtype=dtype, device=device)
        self._bank = AdapterBank(self.model)
        self.passes = Passes(self.model, self._bank, dtype=dtype, micro_batch_tokens=micro_batch_tokens, lean=lean)
        self._tenants: dict[SessionId, Tenant] = {}
        self._check_head()

    def open(self, session_id: SessionId, lora: LoraConfig) -> None:
        self._bank.attach(session_id, lora)
        self._tenants[session_id] = Tenant(lora=lora, moments=optim.Moments.zeros(self._masters(session_id)))

    def close(self, session_id: SessionId) -> None:
        if self._tenants.pop(session_id, None) is not None:
            self._bank.detach(session_id)

    def optimizer_step(self, session_id: SessionId) -> int:
        return self._tenants[session_id].moments.step

    def forward(self, session_id: SessionId, payload: Forward, note: Note = unnoted) -> ForwardResult:
        return self._compute(session_id, payload, note, train=False)

    def forward_backward(self, session_id: SessionId, payload: ForwardBackward, note: Note = unnoted) -> ForwardResult:
        masters = self._masters(session_id)
        tenant = self._tenants[session_id]
        try:
            result = self._compute(session_id, payload, note, train=True)
            gradients = [
                torch.zeros_like(master, requires_grad=False) if master.grad is None else master.grad
                for master in masters
            ]
            window = gradients if tenant.window is None else torch._foreach_add(tenant.window, gradients)  # pyright: ignore
            if not math.isfinite(optim.global_norm(list(window))):
                raise Invalid("the gradient of this batch is not finite", code="non_finite_gradient", field="data")
            tenant.window = list(window)
        finally:
            for master in masters:
                master.grad = None
        tenant.recent = self._recent(payload)
        return result

    def optim_step(self, session_id: SessionId, payload: OptimStep) -> OptimStepResult:
        tenant = self._tenants[session_id]
        if tenant.window is None:
            raise Invalid(
                "optim_step needs a forward_backward since the last one: there is no gradient to step on",
                code="empty_window",
            )
        window, tenant.window = tenant.window, None
        masters = self._bank.tensors(session_id)
        is_b = [name.endswith(".lora_B") for name in masters]
        norm = optim.step(list(masters.values()), window, tenant.moments, payload, is_b=is_b)
        if not math.isfinite(norm):
            raise Invalid(
                "the accumulated gradient is not finite; it was thrown away and no step was taken",
                code="non_finite_gradient",
            )
        return OptimStepResult(
            optimizer_step=tenant.moments.step,
            metrics={"grad_norm:mean": norm, "learning_rate:mean": payload.learning_rate},
        )

    def discard_window(self, session_id: SessionId) -> bool:
        tenant = self._tenants[session_id]
        discarded, tenant.window = tenant.window is not None, None
        return discarded

    def state(self, session_id: SessionId) -> snapshots.State:
        """Return everything the session is, by reference: valid until its next operation."""
        tenant = self._tenants[session_id]
        return snapshots.State(
            lora=tenant.lora,
            weights=self._bank.tensors(session_id),
            moments=tenant.moments,
            window=tenant.window,
            recent=tenant.recent,
        )

    def write_snapshot(self, session_id: SessionId, directory: Path) -> None:
        snapshots.write(directory, self.state(session_id))

    def restore(self, session_id: SessionId, lora: LoraConfig, directory: Path) -> None:
        state = snapshots.read(directory, self._shapes(lora))
        if state.lora != lora:
            raise CorruptState(f"snapshot was taken with {state.lora}, the session has {lora}")
        self._bank.attach(session_id, lora, state.weights)
        self._tenants[session_id] = Tenant(
            lora=lora,
            moments=self._on_device(state.moments),
            window=None if state.window is None else [tensor.to(self._device) for tensor in state.window],
            recent=state.recent,
        )

    def write_state(self, session_id: SessionId, directory: Path) -> None:
        snapshots.write(directory, replace(self.state(session_id), window=None))

    def load_state(self, session_id: SessionId, directory: Path, *, optimizer: bool) -> Loaded:
        tenant = self._tenants[session_id]
        saved = snapshots.read_lora(directory)
        if replace(saved, seed=tenant.lora.seed) != tenant.lora:
            raise Invalid(
                f"the state is of an adapter with other settings ({_layout(saved)}) than this session's "
                f"({_layout(tenant.lora)})",
                code="lora_mismatch",
                field="version",
            )
        state = snapshots.read(directory, self._shapes(tenant.lora))
        with torch.no_grad():
            for name, master in self._bank.tensors(session_id).items():
                master.copy_(state.weights[name])
        masters = self._masters(session_id)
        tenant.moments = self._on_device(state.moments) if optimizer else optim.Moments.zeros(masters)
        discarded, tenant.window = tenant.window is not None, None
        tenant.recent = state.recent
        return Loaded(optimizer_step=tenant.moments.step, discarded_gradient=discarded)

    def write_adapter(self, session_id: SessionId, directory: Path) -> Canary:
        tenant = self._tenants[session_id]
        adapter = stage.export(self._bank.tensors(session_id), tenant.lora, DTYPES[self._base.dtype])
        stage.write_adapter(directory, adapter, self._base.name)
        stage.validate(directory, self._bank.targets(tenant.lora), tenant.lora.rank)
        exported = replace(tenant.lora, alpha=float(adapter.alpha), use_rslora=False)
        tokens = tenant.recent or canary_tokens.fixed(self._base.vocab_size, self._base.context_length)
        self._bank.attach(_CANARY_ADAPTER, exported, adapter.tensors)
        try:
            logprobs = self._score(_CANARY_ADAPTER, tokens)
        finally:
            self._bank.detach(_CANARY_ADAPTER)
        return Canary(tokens=tokens, logprobs=logprobs, base_logprobs=self._score(None, tokens))

    def write_merged(self, session_id: SessionId, directory: Path) -> None:
        tenant = self._tenants[session_id]
        merge.write_merged(
            self._base.path,
            directory,
            self._bank.tensors(session_id),
            tenant.lora.scale,
            head_path=self.model.head_path,
            embedding_path=self.model.embedding_path,
            tied=self.model.tied,
        )

    def _compute(
        self, session_id: SessionId, payload: Forward | ForwardBackward, note: Note, *, train: bool
    ) -> ForwardResult:
        """Run all micro-batches; with ``train`` leave the summed gradient in the masters' ``grad``."""
        outputs: list[TensorData | None] = [None] * len(payload.data)
        config = payload.loss_fn_config
        report = Report(sum(datum.loss_fn_inputs["target_tokens"].size for datum in payload.data))
        rows, lean = 0, 0
        shares = self.passes.shares(payload.data)
        with self.passes.active(session_id, shares), torch.set_grad_enabled(train):
            for share in shares:
                batch = assemble(payload.data, share.rows, self._device, fills(payload.loss_fn, config))
                trained_Q = trained_positions(payload.loss_fn, batch.inputs, config)
                logprobs_Q = self.passes.logprobs(
                    session_id,
                    batch,
                    share.tree,
                    temperature=config.get("temperature", 1.0),
                    trained_Q=trained_Q if train else None,
                )
                losses_Q = token_losses(payload.loss_fn, logprobs_Q, batch.inputs, config, batch.lengths)
                _require_finite(losses_Q, logprobs_Q, batch)
                if train:
                    losses_Q.sum().backward()  # pyright: ignore[reportUnknownMemberType]
                report.add(losses_Q, logprobs_Q, batch.inputs.get("logprobs"), trained_Q)
                if "ref_log_prob" in batch.inputs:
                    weights_P = kl_weights(payload.loss_fn, batch.inputs)
                    report.add_reference(logprobs_Q, batch.inputs["ref_log_prob"], weights_P)
                for row, values in zip(batch.rows, batch.split(logprobs_Q.detach()), strict=True):
                    outputs[row] = to_data(values)
                rows += batch.tokens_BT.numel() if share.tree is None else len(share.tree.tokens)
                lean += 0 if share.tree is None else len(share.rows)
                note(len(outputs) - outputs.count(None), len(outputs))
        ran = {
            "computed_tokens:sum": float(rows),
            "lean_decoder:mean": lean / len(outputs),
            f"compute_{str(self.model.dtype).removeprefix('torch.')}:mean": 1.0,
        }
        return ForwardResult(
            outputs=tuple({"logprobs": output} for output in outputs if output is not None),
            metrics=report.metrics() | ran,
        )

    def _score(self, adapter: str | None, sequences: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """Return the log-probability of every token but the first, under an adapter or (None) the base."""
        return tuple(tuple(to_data(values).values()) for values in self.passes.score(adapter, sequences, self._device))

    def _check_head(self) -> None:
        """Refuse a model whose logits are more than head times hidden state (scaled, capped): ours would differ."""
        sequence = canary_tokens.fixed(self._base.vocab_size, 17)[0]
        tokens = torch.tensor([sequence], device=self._device)
        with torch.no_grad():
            expected = self.model.logits(tokens[:, :-1])[0].float().log_softmax(dim=-1)
        expected_P = expected.gather(1, tokens[0, 1:, None]).squeeze(1)
        found_P = torch.tensor(self._score(None, [sequence])[0], device=self._device)
        noise = 1e-3 if self.model.dtype == torch.float32 else 0.1  # nats; a scaled or capped head is off by more
        if not (found_P - expected_P).abs().mean() < noise:
            raise ValueError(f"{self._base.name}: this architecture changes its logits after the head; not supported")

    def _recent(self, payload: ForwardBackward) -> tuple[tuple[int, ...], ...]:
        """Return the canary's tokens from this batch, spread over its datums."""
        stride = -(-len(payload.data) // canary_tokens.MAX_SEQUENCES)
        order = [index for start in range(stride) for index in range(start, len(payload.data), stride)]
        sequences = [[int(token) for token in payload.data[index].model_input.values()] for index in order[:64]]
        return canary_tokens.from_sequences(sequences)

    def _masters(self, session_id: SessionId) -> list[Any]:
        return list(self._bank.tensors(session_id).values())

    def _shapes(self, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for path, (out_features, in_features) in self._bank.targets(lora).items():
            shapes[f"{path}.lora_A"] = (lora.rank, in_features)
            shapes[f"{path}.lora_B"] = (out_features, lora.rank)
        return shapes

    def _on_device(self, moments: optim.Moments) -> optim.Moments:
        return optim.Moments(
            first=[tensor.to(self._device) for tensor in moments.first],
            second=[tensor.to(self._device) for tensor in moments.second],
            step=moments.step,
        )


def _layout(lora: LoraConfig) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(lora).items() if name != "seed")


def _require_finite(losses_Q: Tensor, logprobs_Q: Tensor, batch: MicroBatch) -> None:
    bad_Q = ~(torch.isfinite(losses_Q) & ~torch.isnan(logprobs_Q))
    if not bad_Q.any():
        return
    for datum, bad in zip(batch.rows, batch.split(bad_Q), strict=True):
        if bad.any():
            position = int(bad.nonzero()[0][0].item())
            raise Invalid(
                f"the loss of data[{datum}] is not finite at position {position}",
                code="non_finite_loss",
                field=f"data[{datum}]",
                details={"datum": datum, "position": position},
            )
