"""What computes: named in snapshots and sessions, so that a replay by something else can be told."""

from collections.abc import Mapping
from importlib.metadata import version

import torch

_LIBRARIES = ("torch", "transformers", "peft")


def made_with(device: torch.device, dtype: torch.dtype, head_dtype: torch.dtype) -> Mapping[str, str]:
    """Return everything outside a session's rules that its bits may depend on."""
    kind = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {
        "device": f"{device.type} {kind}",
        "compute_dtype": str(dtype).removeprefix("torch."),
        "head_dtype": str(head_dtype).removeprefix("torch."),
        **{name: version(name) for name in _LIBRARIES},
    }
