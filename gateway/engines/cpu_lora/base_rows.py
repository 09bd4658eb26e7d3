"""Base rows (index -1) in a batch with LoRA rows are left alone (vllm-project/vllm#48421, #49656).

The stock torch ops gather the weights of every row; index -1 gathers the last slot's, so a base row gets another
tenant's adapter added. Here the stock op sees only the rows that have an adapter.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops as stock
from vllm.lora.punica_wrapper import punica_cpu


def skip_base_rows() -> None:
    """Replace the six ops under the names by which the CPU wrapper imported them."""
    for name, op in OPS.items():
        setattr(punica_cpu, name, op)


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    def shrink(x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor) -> None:
        stock.bgmv_shrink(x, lora_a_weights, y, indices, scaling)

    _on_adapter_rows(shrink, inputs, output_tensor, lora_indices_tensor)


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    def expand(x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor) -> None:
        stock.bgmv_expand(x, lora_b_weights, y, indices, add_inputs)

    _on_adapter_rows(expand, inputs, output_tensor, lora_indices_tensor)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    def expand(x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor) -> None:
        stock.bgmv_expand_slice(x, lora_b_weights, y, indices, slice_offset, slice_size, add_inputs)

    _on_adapter_rows(expand, inputs, output_tensor, lora_indices_tensor)


def sgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    scaling: float,
) -> None:
    rows = torch.repeat_interleave(lora_indices_tensor, seq_len_tensor)
    bgmv_shrink(inputs, lora_a_weights, output_tensor, rows, scaling)


def sgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    add_inputs: bool = False,
) -> None:
    rows = torch.repeat_interleave(lora_indices_tensor, seq_len_tensor)
    bgmv_expand(inputs, lora_b_weights, output_tensor, rows, add_inputs)


def sgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
) -> None:
    rows = torch.repeat_interleave(lora_indices_tensor, seq_len_tensor)
    bgmv_expand_slice(inputs, lora_b_weights, output_tensor, rows, slice_offset, slice_size, add_inputs)


OPS: dict[str, Callable[..., Any]] = {
    "bgmv_shrink": bgmv_shrink,
    "bgmv_expand": bgmv_expand,
    "bgmv_expand_slice": bgmv_expand_slice,
    "sgmv_shrink": sgmv_shrink,
    "sgmv_expand": sgmv_expand,
    "sgmv_expand_slice": sgmv_expand_slice,
}


def _on_adapter_rows(
    op: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    inputs: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Run ``op`` on the rows whose index is not negative; the others of ``output`` keep what they hold.

    One index for several rows (the stock ops broadcast it) is the same index for each.
    """
    if indices.numel() == 1 and inputs.shape[0] != 1:
        indices = indices.expand(inputs.shape[0])
    rows = (indices >= 0).nonzero().squeeze(1)
    if rows.numel() == indices.numel():
        op(inputs, output, indices)
    elif rows.numel() > 0:
        chosen = output[rows]
        op(inputs[rows], chosen, indices[rows])
        output[rows] = chosen
