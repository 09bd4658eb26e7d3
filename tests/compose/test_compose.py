"""compose.yaml, as docker-compose itself reads it: what is published, who gets a GPU, and how engines are started."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.engines.launch import Device, EngineSpec, launch_vllm

ROOT = Path(__file__).parents[2]
SECRETS = {"POSTGRES_PASSWORD": "p", "LOOPLINE_MASTER_KEY": "m" * 64, "LOOPLINE_ENGINE_KEY": "e" * 64}
GPU = {"driver": "nvidia", "capabilities": ["gpu"]}


def docker_compose() -> list[str]:
    """Return the command, from Debian's package or Docker's plugin. Missing in CI is an error, elsewhere a skip."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        return ["docker", "compose"]
    if os.environ.get("CI"):
        pytest.fail("docker-compose is missing: apt-get install docker-compose")
    pytest.skip("needs docker-compose: apt-get install docker-compose")


def config(profile: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run ``config`` on a copy, where no ``.env`` of this checkout is found."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(ROOT / "compose.yaml", directory)
        return subprocess.run(
            [*docker_compose(), "--profile", profile, "config"],
            cwd=directory,
            env={"PATH": os.environ["PATH"], **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def services(profile: str, **env: str) -> dict[str, Any]:
    """Return the services that ``up`` with this profile would start."""
    done = config(profile, {**SECRETS, **env})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return {name: entry for name, entry in found.items() if entry.get("profiles", [profile]) == [profile]}


def devices(service: dict[str, Any]) -> list[dict[str, Any]]:
    return service["deploy"]["resources"]["reservations"]["devices"]


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_each_profile_is_valid_and_starts_its_own_engine_and_trainer(profile: str) -> None:
    assert sorted(services(profile)) == [f"engine-{profile}", "gateway", "postgres", "prepare", f"trainer-{profile}"]


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_only_the_gateways_port_is_published_and_only_on_this_machine(profile: str) -> None:
    published = {name: entry["ports"] for name, entry in services(profile).items() if entry.get("ports")}
    assert list(published) == ["gateway"]
    assert "127.0.0.1" in str(published["gateway"])


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_everything_that_keeps_running_is_restarted_and_what_serves_has_a_health_check(profile: str) -> None:
    found = services(profile)
    assert {name for name, entry in found.items() if entry.get("restart") != "unless-stopped"} == {"prepare"}
    assert {name for name, entry in found.items() if "healthcheck" in entry} == {
        "gateway",
        "postgres",
        f"engine-{profile}",
    }


def test_engine_and_trainer_share_a_gpu_or_take_two_as_the_variables_say() -> None:
    shared, apart = services("gpu"), services("gpu", LOOPLINE_ENGINE_GPU="1", LOOPLINE_TRAINER_GPU="2")
    assert devices(shared["engine-gpu"]) == devices(shared["trainer-gpu"]) == [{**GPU, "device_ids": ["0"]}]
    assert devices(apart["engine-gpu"]) == [{**GPU, "device_ids": ["1"]}]
    assert devices(apart["trainer-gpu"]) == [{**GPU, "device_ids": ["2"]}]


@pytest.mark.parametrize("device", list(Device))
def test_engines_in_containers_get_the_arguments_that_loopline_up_gives_them(device: Device) -> None:
    """Equal but for the address, as a container's engine listens on its private network, and but for the door that the
    official image for GPUs lacks: on that network is nobody else."""
    spec = EngineSpec(
        model_path=Path("/data/models/smollm2-135m-instruct"),
        served_name="smollm2-135m-instruct",
        port=8000,
        key="e" * 64,
        device=device,
    )
    launch = launch_vllm(spec)
    service = services(device.value)[f"engine-{device}"]

    other = {"--host=127.0.0.1", *(["--middleware=gateway.engines.door.Door"] if device is Device.GPU else [])}
    assert set(service["command"]) == flags(launch.command) - other | {"--host=0.0.0.0"}
    environment = {name: str(value) for name, value in service["environment"].items()}
    expected = {**launch.environment, **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if device is Device.CPU else {})}
    assert environment == expected


@pytest.mark.parametrize("secret", sorted(SECRETS))
def test_a_missing_secret_is_refused_by_name(secret: str) -> None:
    done = config("cpu", {name: value for name, value in SECRETS.items() if name != secret})
    assert done.returncode != 0
    assert secret in done.stderr


def test_the_example_names_every_variable_and_its_default() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    text = (ROOT / "compose.yaml").read_text()
    used = set(re.findall(r"(?<!\$)\$\{([A-Z0-9_]+)", text))
    assert set(example) == used
    for name, value in example.items():
        if name not in SECRETS:
            assert f"${{{name}:-{value}}}" in text


def test_images_run_as_a_user_of_their_own() -> None:
    for path in sorted((ROOT / "docker").glob("*.Dockerfile")):
        lines = path.read_text().splitlines()
        assert lines.count("USER loopline") == 1, path
        assert sum(line.startswith("FROM ") for line in lines) == 2, path


def flags(command: tuple[str, ...]) -> set[str]:
    """Return the options of ``python -m vllm... --a b --c`` in the form ``--a=b``, ``--c``."""
    found: list[str] = []
    for word in command[3:]:
        if word.startswith("--"):
            found.append(word)
        else:
            found[-1] += f"={word}"
    return set(found)
