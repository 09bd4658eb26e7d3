"""Which dtype a device computes in by default: the fastest whose gradients still point where float32's do."""

import torch


def default_compute_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device multiplies it in hardware, else float32.

    A CPU without AMX or AVX512-BF16 emulates bfloat16 products, forty times slower than float32 ones and coarser.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type != "cpu":
        return torch.float32
    found = (torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported())  # pyright: ignore[reportPrivateUsage]
    return torch.bfloat16 if any(found) else torch.float32
