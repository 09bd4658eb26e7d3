"""Prompt log-probabilities while lm_head is wrapped for LoRA, in a step of two or more sequences.

The stock model runner asks for the logits of one request's prompt rows while the wrapper still maps the rows it is
about to sample from (one per sequence): the shapes do not fit and the einsum error kills the engine. Here the runner
does one request at a time, and during it every row of the logits belongs to that request's slot.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

_SLOT = "loopline_scoring_slot"  # on the wrapper, while prompts are scored: the slot of every row, -1 for base
_APPLIED = "loopline_prompt_scores"  # on the wrapper's class


def score_prompts_by_request() -> None:
    """Patch runner and wrapper. Applying it twice is applying it once."""
    wrapper_class = import_module("vllm.lora.punica_wrapper.punica_cpu").PunicaWrapperCPU
    runner_class = import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
    if hasattr(wrapper_class, _APPLIED):
        return
    stock_logits: Callable[..., None] = wrapper_class.add_lora_logits
    stock_scores: Callable[..., dict[str, Any]] = runner_class._get_prompt_logprobs_dict

    def add_lora_logits(self: Any, y: torch.Tensor, x: torch.Tensor, *args: Any, **options: Any) -> None:
        slot: int | None = getattr(self, _SLOT, None)
        if slot is None:
            stock_logits(self, y, x, *args, **options)
        elif slot >= 0:
            with _all_rows(self, slot, x.numel() // x.shape[-1]):
                stock_logits(self, y, x, *args, **options)

    def _get_prompt_logprobs_dict(
        self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        pending: dict[str, int] = self.num_prompt_logprobs
        if not pending or not self.lora_config:
            return stock_scores(self, hidden_states, num_scheduled_tokens)
        manager = self.lora_manager._adapter_manager
        scores: dict[str, Any] = {}
        try:
            for request_id in list(pending):
                self.num_prompt_logprobs = {request_id: pending[request_id]}
                with _scoring(manager, _slot_of(self, request_id)):
                    scores |= stock_scores(self, hidden_states, num_scheduled_tokens)
                if request_id not in self.num_prompt_logprobs:
                    del pending[request_id]
        finally:
            self.num_prompt_logprobs = pending
        return scores

    wrapper_class.add_lora_logits = add_lora_logits
    runner_class._get_prompt_logprobs_dict = _get_prompt_logprobs_dict
    setattr(wrapper_class, _APPLIED, True)


def _slot_of(runner: Any, request_id: str) -> int:
    row: int | None = runner.input_batch.req_id_to_index.get(request_id)
    lora_id = 0 if row is None else int(runner.input_batch.request_lora_mapping[row])
    slots: list[int | None] = runner.lora_manager._adapter_manager.lora_index_to_id
    return slots.index(lora_id) if lora_id > 0 else -1


@contextmanager
def _scoring(manager: Any, slot: int) -> Iterator[None]:
    wrappers = list(manager.punica_wrapper_mapping.values())
    for wrapper in wrappers:
        setattr(wrapper, _SLOT, slot)
    try:
        yield
    finally:
        for wrapper in wrappers:
            setattr(wrapper, _SLOT, None)


@contextmanager
def _all_rows(wrapper: Any, slot: int, count: int) -> Iterator[None]:
    """Map ``count`` rows to ``slot`` in the wrapper's own tables, and put back what was there."""
    rows, length = wrapper._sampler_indices[:count].clone(), wrapper.indices_len[1]
    wrapper._sampler_indices[:count] = slot
    wrapper.indices_len[1] = count
    try:
        yield
    finally:
        wrapper._sampler_indices[:count] = rows
        wrapper.indices_len[1] = length
