"""The command line of an engine: what must be on it, and what must not."""

import dataclasses
from pathlib import Path

import pytest

from gateway.engines.launch import CPU_LORAS_PER_SLOT, Device, EngineSpec, Launch, launch_vllm

SPEC = EngineSpec(model_path=Path("/models/m"), served_name="m", port=8101, key="random-key-of-this-boot")


def option(launch: Launch, name: str) -> str:
    return launch.command[launch.command.index(name) + 1]


def test_the_engine_listens_on_loopback_and_its_key_is_not_on_the_command_line() -> None:
    launch = launch_vllm(SPEC)

    assert option(launch, "--host") == "127.0.0.1"
    assert launch.environment["VLLM_API_KEY"] == SPEC.key
    assert not any(SPEC.key in part for part in launch.command)


def test_the_engine_takes_no_default_of_the_model_and_phones_nobody() -> None:
    launch = launch_vllm(SPEC)

    assert option(launch, "--generation-config") == "vllm"
    assert option(launch, "--logprobs-mode") == "processed_logprobs"
    assert "VLLM_SERVER_DEV_MODE" not in launch.environment
    assert (launch.environment["HF_HUB_OFFLINE"], launch.environment["VLLM_NO_USAGE_STATS"]) == ("1", "1")


@pytest.mark.parametrize(("asked", "given"), [(1, "1"), (4, "8"), (8, "8"), (33, "64"), (512, "512")])
def test_the_rank_is_the_smallest_that_fits(asked: int, given: str) -> None:
    assert option(launch_vllm(dataclasses.replace(SPEC, max_lora_rank=asked)), "--max-lora-rank") == given


def test_host_memory_holds_several_adapters_per_slot() -> None:
    launch = launch_vllm(dataclasses.replace(SPEC, max_loras=3))

    assert option(launch, "--max-loras") == "3"
    assert int(option(launch, "--max-cpu-loras")) == 3 * CPU_LORAS_PER_SLOT


def test_cpu_and_gpu_differ_in_what_is_theirs() -> None:
    cpu = launch_vllm(SPEC)
    gpu = launch_vllm(dataclasses.replace(SPEC, device=Device.GPU, visible_devices="1", gpu_memory=0.5))

    assert "--enforce-eager" in cpu.command
    assert cpu.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert cpu.environment["GOMP_SPINCOUNT"] == "5000"  # of 300,000: a thread that waits leaves its core to the server
    assert option(gpu, "--gpu-memory-utilization") == "0.5"
    assert gpu.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert not any(name.startswith(("VLLM_CPU", "GOMP")) for name in gpu.environment)
    # Only the CPU engine with our plugin scores prompts with a LoRA on lm_head exactly, and says so in every answer.
    assert "--fingerprint-value" in cpu.command
    assert "--fingerprint-value" not in gpu.command


@pytest.mark.parametrize("wrong", [{"max_loras": 1}, {"max_lora_rank": 513}])
def test_an_impossible_engine_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(SPEC, **wrong)
