"""The real backend: torch and PEFT, many sessions on one frozen base model.

The base computes in the compute dtype; masters, gradients, moments and everything after the head's product are float32.
There is no dropout and no other randomness after a session's first tensors. Suffixes as in ``batching``.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gateway.core.canary import Canary
from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.ids import SessionId
from gateway.core.payloads import Forward, ForwardBackward, OptimStep
from gateway.core.results import ForwardResult, OptimStepResult
from gateway.core.sessions import ComputeRules, LoraConfig
from trainer import canary_tokens, environment, many, merge, optim, snapshots, stage
from trainer.adapters import AdapterBank, initial_tensors
from trainer.backend import CorruptState, Loaded
from trainer.batching import to_data
from trainer.computing import compute
from trainer.decoder import default_compute_dtype
from trainer.language_model import LanguageModel
from trainer.logprobs import target_logprobs
from trainer.memory import Footprint, machine_bytes, peak_bytes
from trainer.model_hash import hash_model
from trainer.objectives import objective_of
from trainer.passes import Passes
from trainer.peft_scorer import PeftScorer
from trainer.progress import Note, unnoted
from trainer.tenants import Tenant, Tenants, moments_on

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


def device_bytes(device: torch.device) -> int:
    """Return how much memory the device has in all."""
    if device.type != "cuda":
        return machine_bytes()
    cuda: Any = torch.cuda
    return int(cuda.get_device_properties(device).total_memory)


def pick_dtype(base: BaseModel, device: torch.device) -> torch.dtype:
    """Return the engine's dtype where the device multiplies it in hardware, else float32: faster there, and finer."""
    fast = default_compute_dtype(device)
    return fast if fast == torch.float32 else DTYPES[base.dtype]


class PeftBackend:
    """``TrainingBackend`` on torch.

    ``compute_dtype`` None takes ``pick_dtype``; ``micro_batch_tokens`` bounds the tokens computed at once, and
    ``operation_bytes`` (None: half of the device's) the memory for that. Sessions beyond ``max_on_device`` wait in the
    host's memory. With ``lean`` False plain transformers + PEFT computes also what the lean decoder could; with
    ``exact_head`` logits are computed in float32 whatever the layers compute in.

    Raises:
        ValueError: micro-batches of that size do not fit into that memory; the architecture is not supported.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        device: torch.device,
        compute_dtype: str | None,
        micro_batch_tokens: int = 2048,
        operation_bytes: int | None = None,
        max_on_device: int = 16,
        lean: bool = True,
        exact_head: bool = False,
    ) -> None:
        self._base = base
        self._device = device
        dtype = DTYPES[compute_dtype] if compute_dtype else pick_dtype(base, device)
        self.model = LanguageModel(base.path, dtype=dtype, device=device)
        self._bank = AdapterBank(self.model)
        footprint = Footprint(
            shape=self.model.shape(),
            limit_bytes=operation_bytes or device_bytes(device) // 2,
            micro_batch_tokens=micro_batch_tokens,
        )
        footprint.require_room()
        self.passes = Passes(self.model, self._bank, dtype=dtype, footprint=footprint, lean=lean, exact_head=exact_head)
        self.scorer = PeftScorer(self._bank, self.passes, device)
        self.tenants = Tenants(self._bank, device, max_on_device=max_on_device)
        self._rules = ComputeRules(threads=torch.get_num_threads(), micro_batch_tokens=micro_batch_tokens)
        self._rules_of: dict[SessionId, ComputeRules] = {}
        self._made_with = environment.made_with(device, dtype, self.passes.head_dtype)
        self.base_sha256 = hash_model(base.path)
        self._check_model()

    @property
    def rules(self) -> ComputeRules:
        return self._rules

    @property
    def made_with(self) -> Mapping[str, str]:
        return self._made_with

    def open(self, session_id: SessionId, lora: LoraConfig, rules: ComputeRules | None = None) -> None:
        self._rules_of[session_id] = rules or self._rules
        self.tenants.open(session_id, lora)

    def close(self, session_id: SessionId) -> None:
        self._rules_of.pop(session_id, None)
        self.tenants.close(session_id)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else peak_bytes()

    def optimizer_step(self, session_id: SessionId) -> int:
        return self._use(session_id).moments.step

    def check(self, session_id: SessionId, payload: Forward | ForwardBackward) -> None:
        self._use(session_id)
        self.passes.check(session_id, objective_of(payload).data)

    def forward(self, session_id: SessionId, payload: Forward, note: Note = unnoted) -> ForwardResult:
        self._use(session_id)
        return compute(self.passes, session_id, payload, self._device, note, train=False)

    def forward_backward(self, session_id: SessionId, payload: ForwardBackward, note: Note = unnoted) -> ForwardResult:
        tenant = self._use(session_id)
        masters = self.tenants.masters(session_id)
        try:
            result = compute(self.passes, session_id, payload, self._device, note, train=True)
            gradients = [
                torch.zeros_like(master, requires_grad=False) if master.grad is None else master.grad
                for master in masters
            ]
            window = gradients if tenant.window is None else many.add(tenant.window, gradients)
            if not math.isfinite(optim.global_norm(window)):
                raise Invalid("the gradient of this batch is not finite", code="non_finite_gradient", field="data")
            recent = self._recent(payload)
        finally:
            for master in masters:
                master.grad = None
        tenant.window, tenant.recent = window, recent
        return result

    def optim_step(self, session_id: SessionId, payload: OptimStep) -> OptimStepResult:
        tenant = self._use(session_id)
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

    def _use(self, session_id: SessionId) -> Tenant:
        """Return a session on the device, with threads and batching set to its own rules."""
        rules = self._rules_of.get(session_id, self._rules)
        if torch.get_num_threads() != rules.threads:
            torch.set_num_threads(rules.threads)
        if self.passes.footprint.micro_batch_tokens != rules.micro_batch_tokens:
            self.passes.footprint = replace(self.passes.footprint, micro_batch_tokens=rules.micro_batch_tokens)
        return self.tenants.use(session_id)

    def discard_window(self, session_id: SessionId) -> bool:
        tenant = self._use(session_id)
        discarded, tenant.window = tenant.window is not None, None
        return discarded

    def state(self, session_id: SessionId) -> snapshots.State:
        """Return everything the session is, by reference: valid until its next operation."""
        return self.tenants.state(session_id)

    def write_snapshot(self, session_id: SessionId, directory: Path) -> None:
        snapshots.write(directory, self.state(session_id))

    def restore(
        self, session_id: SessionId, lora: LoraConfig, directory: Path, rules: ComputeRules | None = None
    ) -> None:
        state = snapshots.read(directory, self._shapes(lora))
        if state.lora != lora:
            raise CorruptState(f"snapshot was taken with {state.lora}, the session has {lora}")
        self._rules_of[session_id] = rules or self._rules
        self.tenants.place(session_id, state)

    def write_state(self, session_id: SessionId, directory: Path) -> None:
        snapshots.write(directory, replace(self.state(session_id), window=None))

    def load_state(self, session_id: SessionId, directory: Path, *, optimizer: bool) -> Loaded:
        tenant = self._use(session_id)
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
        fresh = optim.Moments.zeros(self.tenants.masters(session_id))
        tenant.moments = moments_on(self._device, state.moments) if optimizer else fresh
        discarded, tenant.window = tenant.window is not None, None
        tenant.recent = state.recent
        return Loaded(optimizer_step=tenant.moments.step, discarded_gradient=discarded)

    def load_adapter(self, session_id: SessionId, directory: Path) -> Loaded:
        tenant = self._use(session_id)
        masters = self._bank.tensors(session_id)
        try:
            saved = stage.masters(stage.read_adapter(directory), tenant.lora)
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise CorruptState(f"the adapter cannot be read: {error}") from error
        if {name: tensor.shape for name, tensor in saved.items()} != {name: m.shape for name, m in masters.items()}:
            raise CorruptState("the adapter has other tensors than the session")
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(saved[name])
        tenant.moments = optim.Moments.zeros(self.tenants.masters(session_id))
        discarded, tenant.window = tenant.window is not None, None
        return Loaded(optimizer_step=0, discarded_gradient=discarded)

    def write_adapter(self, session_id: SessionId, directory: Path) -> Canary:
        tenant = self._use(session_id)
        return self._write_adapter(self._bank.tensors(session_id), tenant, directory)

    def write_imported(self, session_id: SessionId, source: Path, directory: Path) -> Canary:
        tenant = self._use(session_id)
        targets = self._bank.targets(tenant.lora)
        given = stage.masters(stage.read_adapter(source), tenant.lora)
        stage.check_modules(given, targets)
        return self._write_adapter({**initial_tensors(tenant.lora, targets), **given}, tenant, directory)

    def _write_adapter(self, masters: Mapping[str, torch.Tensor], tenant: Tenant, directory: Path) -> Canary:
        adapter = stage.export(masters, tenant.lora, DTYPES[self._base.dtype])
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
        tenant = self._use(session_id)
        merge.write_merged(
            self._base.path,
            directory,
            self._bank.tensors(session_id),
            tenant.lora.scale,
            head_path=self.model.head_path,
            embedding_path=self.model.embedding_path,
            tied=self.model.tied,
        )

    def _score(self, adapter: str | None, sequences: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """Return the log-probability of every token but the first, under an adapter or (None) the base, as engines
        compute it: in 16 bits they lose part of a small adapter's effect.
        """
        dtype = DTYPES[self._base.dtype]
        served = None if dtype == torch.float32 else dtype
        scores = self.passes.score(adapter, sequences, self._device, served)
        return tuple(tuple(to_data(values).values()) for values in scores)

    def _check_model(self) -> None:
        """Refuse a model of which transformers computes other log-probabilities than we do, on a fixed sequence."""
        sequence = canary_tokens.fixed(self._base.vocab_size, 17)[0]
        tokens_BT = torch.tensor([sequence], device=self._device)
        inputs_BT, targets_P = tokens_BT[:, :-1], tokens_BT[0, 1:]
        with torch.no_grad():
            expected_P = self.model.logits(inputs_BT)[0].float().log_softmax(dim=-1).gather(1, targets_P[:, None])[:, 0]
            head_P = target_logprobs(self.model.hidden(inputs_BT)[0], targets_P, self._bank.head(None))
        found_P = torch.tensor(self._score(None, [sequence])[0], device=self._device)
        name, exact = self._base.name, self.model.dtype == torch.float32
        if not (head_P - expected_P).abs().mean() < (1e-3 if exact else 0.05):
            raise ValueError(f"{name}: this architecture changes its logits after the head; not supported")
        if not (found_P - expected_P).abs().mean() < (1e-3 if exact else 0.5):  # two ways to round, 30 layers: 0.1
            raise ValueError(f"{name}: this architecture's layers are not computed as transformers does; not supported")

    def _recent(self, payload: ForwardBackward) -> tuple[tuple[int, ...], ...]:
        """Return the canary's tokens from this batch, spread over its datums."""
        stride = -(-len(payload.data) // canary_tokens.MAX_SEQUENCES)
        order = [index for start in range(stride) for index in range(start, len(payload.data), stride)]
        ends = [payload.data[index].model_input.values()[-canary_tokens.MAX_TOKENS :] for index in order[:64]]
        return canary_tokens.from_sequences([[int(token) for token in end] for end in ends])

    def _shapes(self, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for path, (out_features, in_features) in self._bank.targets(lora).items():
            shapes[f"{path}.lora_A"] = (lora.rank, in_features)
            shapes[f"{path}.lora_B"] = (out_features, lora.rank)
        return shapes


def _layout(lora: LoraConfig) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(lora).items() if name != "seed")
