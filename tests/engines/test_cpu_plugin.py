"""The CPU plugin at the level of the ops, against dense references, and what it says about itself."""

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gateway.engines.cpu_lora.on_import import after_import
from gateway.engines.cpu_plugin import apply_patches, plugin_status

SLOTS, RANK, INPUTS, OUTPUTS = 3, 8, 16, 24
TRUE_RANKS = {0: 8, 1: 3, 2: 1}


@pytest.fixture(scope="module")
def vllm() -> dict[str, Any]:
    """The patched modules of this process; ``stock`` holds the ops as shipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_patches()
        from vllm.lora.layers import LoRAMapping
        from vllm.lora.ops.torch_ops import lora_ops
        from vllm.lora.punica_wrapper import punica_cpu
    return {"stock": lora_ops, "punica_cpu": punica_cpu, "mapping": LoRAMapping}


def stacked(outputs: int = OUTPUTS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of three slots, zero beyond each slot's true rank, as vLLM pads them."""
    generator = torch.Generator().manual_seed(outputs)
    a = torch.randn(SLOTS, 1, RANK, INPUTS, generator=generator)
    b = torch.randn(SLOTS, 1, outputs, RANK, generator=generator)
    for slot, rank in TRUE_RANKS.items():
        a[slot, :, rank:] = 0
        b[slot, :, :, rank:] = 0
    return a.to(dtype), b.to(dtype)


def rows(count: int, width: int = INPUTS, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(
    y: torch.Tensor, x: torch.Tensor, weights: Sequence[tuple[torch.Tensor, torch.Tensor]], indices: Sequence[int]
) -> torch.Tensor:
    """Row by row in float64: y + B A x, slices side by side; base rows as they are."""
    out = y.double()
    for row, slot in enumerate(indices):
        if slot >= 0:
            deltas = [b[slot, 0].double() @ (a[slot, 0].double() @ x[row].double()) for a, b in weights]
            out[row, : sum(len(delta) for delta in deltas)] += torch.cat(deltas)
    return out


def wrapper_of(vllm: dict[str, Any], token_slots: Sequence[int], sampled_slots: Sequence[int]) -> Any:
    """A CPU wrapper whose step maps rows to slots; adapter id n sits in slot n - 1."""
    wrapper = vllm["punica_cpu"].PunicaWrapperCPU(256, 64, "cpu")
    mapping = vllm["mapping"](
        tuple(slot + 1 for slot in token_slots), tuple(slot + 1 for slot in sampled_slots), is_prefill=True
    )
    wrapper.update_metadata(mapping, [1, 2, 3], SLOTS + 1, 512)
    return wrapper


MIXES = {
    "one adapter": [1] * 6,
    "all base": [-1] * 5,
    "blocks": [0, 0, -1, -1, 2, 2, 2],
    "scattered": [2, -1, 0, 2, 1, -1, 0, 2],
}


@pytest.mark.parametrize("indices", MIXES.values(), ids=MIXES.keys())
def test_patched_ops_add_each_rows_adapter_and_leave_base_rows_alone(vllm: dict[str, Any], indices: list[int]) -> None:
    a, b = stacked()
    x, y = rows(len(indices)), rows(len(indices), OUTPUTS, seed=2)
    expected = dense(y, x, [(a, b)], indices)
    buffer = torch.zeros(len(indices), RANK)

    vllm["punica_cpu"].bgmv_shrink(x, a, buffer, torch.tensor(indices), 1.0)
    vllm["punica_cpu"].bgmv_expand(buffer, b, y, torch.tensor(indices), True)

    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_segmented_ops_agree_with_the_dense_reference(vllm: dict[str, Any]) -> None:
    a, b = stacked()
    slots, lengths = torch.tensor([2, -1, 0]), torch.tensor([2, 3, 2])
    indices = torch.repeat_interleave(slots, lengths).tolist()
    x, y = rows(7), rows(7, OUTPUTS + 5, seed=2)
    expected = y.double()
    expected[:, 5:] = dense(y[:, 5:], x, [(a, b)], indices)
    segments = (torch.tensor([0, 2, 5]), lengths, slots, 3, 3, 7)
    buffer = torch.zeros(7, RANK)

    vllm["punica_cpu"].sgmv_shrink(x, a, buffer, *segments, 1.0)
    vllm["punica_cpu"].sgmv_expand_slice(buffer, b, y, *segments, 5, OUTPUTS, True)

    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_stock_op_still_gets_base_rows_wrong(vllm: dict[str, Any]) -> None:
    """When this fails, upstream is fixed: drop ``skip_base_rows`` for that version."""
    a, _ = stacked()
    buffer = torch.zeros(2, RANK)

    vllm["stock"].bgmv_shrink(rows(2), a, buffer, torch.tensor([0, -1]), 1.0)

    assert buffer[1].abs().max() > 0.1


def test_the_stock_op_still_refuses_more_rows_than_indices(vllm: dict[str, Any]) -> None:
    """When this fails, upstream may be fixed: check whether ``score_prompts_by_request`` is still needed."""
    a, _ = stacked()

    with pytest.raises(RuntimeError, match="einsum"):
        vllm["stock"].bgmv_shrink(rows(5), a, torch.zeros(5, RANK), torch.tensor([0, 1]), 1.0)


@pytest.mark.parametrize("indices", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.12)], ids=["fp32", "bf16"])
def test_grouped_linear_equals_the_dense_reference(
    vllm: dict[str, Any], indices: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    widths = (OUTPUTS, 8, 8)  # like q, k, v
    weights = [stacked(width, dtype) for width in widths]
    x, y = rows(len(indices), dtype=dtype), rows(len(indices), sum(widths), seed=2, dtype=dtype)
    expected = dense(y, x, weights, indices)
    wrapper = wrapper_of(vllm, indices, indices)
    wrapper.loopline_ranks = TRUE_RANKS

    wrapper.add_lora_linear(y, x, tuple(a for a, _ in weights), tuple(b for _, b in weights), 1.0, widths)

    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    base = [row for row, slot in enumerate(indices) if slot < 0]
    assert torch.equal(y[base], rows(len(indices), sum(widths), seed=2, dtype=dtype)[base])


def test_grouped_products_use_the_adapters_own_rank(vllm: dict[str, Any]) -> None:
    a, b = stacked()
    a[1, :, TRUE_RANKS[1] :] = b[1, :, :, TRUE_RANKS[1] :] = torch.nan  # beyond the true rank nothing is read
    wrapper = wrapper_of(vllm, [1, 1], [1, 1])
    wrapper.loopline_ranks = TRUE_RANKS
    y = torch.zeros(2, OUTPUTS)

    wrapper.add_lora_linear(y, rows(2), (a,), (b,), 1.0, (OUTPUTS,))

    assert torch.isfinite(y).all()


def test_logits_take_the_sampled_rows_adapters_and_keep_padding(vllm: dict[str, Any]) -> None:
    a, b = stacked()
    x, y = rows(3), rows(3, OUTPUTS + 8, seed=2)  # the base model pads its vocabulary
    expected = dense(y, x, [(a, b)], [2, -1, 0])
    wrapper = wrapper_of(vllm, [2, 2, 2, -1, 0], [2, -1, 0])

    wrapper.add_lora_logits(y, x, a, b, 1.0)

    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("indices", MIXES.values(), ids=MIXES.keys())
def test_grouped_embedding_equals_the_dense_reference(vllm: dict[str, Any], indices: list[int]) -> None:
    _, b = stacked()
    x, y = rows(len(indices), RANK), rows(len(indices), OUTPUTS, seed=2)
    unit = torch.eye(RANK).expand(SLOTS, 1, RANK, RANK)  # the lookup has applied A already
    expected = dense(y, x, [(unit, b)], indices)
    wrapper = wrapper_of(vllm, indices, indices)
    wrapper.loopline_ranks = TRUE_RANKS

    wrapper.add_lora_embedding(y, x, b, add_input=True)

    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("slot", [2, -1])
def test_prompt_rows_are_scored_with_their_requests_adapter(vllm: dict[str, Any], slot: int) -> None:
    a, b = stacked()
    x, y = rows(9), rows(9, OUTPUTS, seed=2)
    expected = dense(y, x, [(a, b)], [slot] * 9)
    wrapper = wrapper_of(vllm, [0, 0, 1], [0, 1])

    wrapper.loopline_scoring_slot = slot
    wrapper.add_lora_logits(y, x, a, b, 1.0)
    wrapper.loopline_scoring_slot = None

    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    assert wrapper.sampler_indices.tolist() == [0, 1]


def test_the_plugin_is_active_on_the_guarded_version_and_can_be_switched_off() -> None:
    assert plugin_status({}).active
    assert plugin_status({"VLLM_PLUGINS": "other,loopline_cpu"}).active

    off = plugin_status({"VLLM_PLUGINS": ""})

    assert (off.active, off.needed) == (False, True)
    assert "VLLM_PLUGINS" in off.reason


def test_importing_the_plugin_imports_no_vllm_torch_or_web_framework() -> None:
    program = """
        import sys, gateway.engines.cpu_plugin
        print([name for name in ("vllm", "torch", "fastapi", "httpx", "pydantic") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_an_action_runs_once_right_after_the_module_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    after_import("awaited_module", lambda: seen.append(sys.modules["awaited_module"].value))
    assert seen == []

    import awaited_module  # pyright: ignore[reportMissingImports]

    assert (seen, awaited_module.value) == ([1], 1)
    monkeypatch.delitem(sys.modules, "awaited_module")


def test_an_adapter_that_enters_a_slot_replaces_the_products_of_the_one_before(vllm: dict[str, Any]) -> None:
    from vllm.lora.model_manager import LoRAModelManager

    a, b = stacked()
    wrapper = wrapper_of(vllm, [1, 1], [1, 1])
    manager = object.__new__(LoRAModelManager)  # no model: what enters the slot is written below
    manager._active_adapters, manager.lora_index_to_id = {}, [8, None, 9]
    manager._registered_adapters = {2: SimpleNamespace(id=2, loras={"q": SimpleNamespace(lora_a=a[1, 0])})}
    manager.modules, manager.punica_wrapper_mapping = {}, {"model": wrapper}
    before = torch.zeros(2, OUTPUTS)
    wrapper.add_lora_linear(before, rows(2), (a,), (b,), 1.0, (OUTPUTS,))

    b[1].mul_(-3.0)
    assert manager.activate_adapter(2)
    after = torch.zeros(2, OUTPUTS)
    wrapper.add_lora_linear(after, rows(2), (a,), (b,), 1.0, (OUTPUTS,))

    assert before.abs().max() > 0.1
    torch.testing.assert_close(after, -3.0 * before, atol=1e-4, rtol=1e-4)
