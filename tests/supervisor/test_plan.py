"""From options to processes: who gets which arguments, secrets, cores and memory."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.core.catalog import parse_catalog
from gateway.supervisor.machine import Machine, multiplies_bfloat16
from gateway.supervisor.models import ModelFacts, ModelProblem, read_facts, render_catalog
from gateway.supervisor.options import DeviceChoice, DTypeChoice, EngineKind, UpOptions
from gateway.supervisor.plan import Plan, PreparedModel, child_environment, choose_device, make_plan, reachable_host
from gateway.supervisor.preparation import parse_model

TWO_CORES = Machine(cores=[0, 1], has_gpu=False, cpu_bfloat16=True)
GPU_BOX = Machine(cores=list(range(16)), has_gpu=True, cpu_bfloat16=False)


def plan_of(machine: Machine = TWO_CORES, names: tuple[str, ...] = ("tiny",), **options: Any) -> Plan:
    facts = ModelFacts(vocab_size=49152, context_length=8192)
    prepared = [
        PreparedModel(name=name, path=Path("/models") / name, facts=facts, engine_port=9000 + index)
        for index, name in enumerate(names)
    ]
    wanted = UpOptions(data_dir=Path("/data"), **options)
    return make_plan(wanted, prepared, machine, engine_key="engine-key", catalog=Path("/data/run/catalog.toml"))


def argument(command: Any, flag: str) -> str:
    return command[list(command).index(flag) + 1]


def test_engine_trainer_and_gateway_start_in_this_order() -> None:
    plan = plan_of()
    assert [process.name for process in plan.processes] == ["engine", "trainer", "gateway"]
    assert [process.command[:3] for process in plan.processes[1:]] == [
        (sys.executable, "-m", "trainer"),
        (sys.executable, "-m", "gateway"),
    ]
    assert [process.probe_url for process in plan.processes] == [
        "http://127.0.0.1:9000/health",
        "http://127.0.0.1:8000/readyz",
        "http://127.0.0.1:8000/livez",
    ]


def test_two_cores_are_both_used_by_engine_and_trainer() -> None:
    engine, trainer, _ = plan_of(TWO_CORES).processes
    assert engine.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert trainer.environment["LOOPLINE_THREADS"] == "2"


@pytest.mark.parametrize(
    ("machine", "chosen", "dtype"),
    [
        (TWO_CORES, None, "bfloat16"),
        (dataclasses.replace(TWO_CORES, cpu_bfloat16=False), None, "float32"),
        (dataclasses.replace(TWO_CORES, cpu_bfloat16=False), DTypeChoice.BFLOAT16, "bfloat16"),
        (GPU_BOX, None, "bfloat16"),
    ],
)
def test_bfloat16_is_the_default_only_where_hardware_multiplies_it(
    machine: Machine, chosen: DTypeChoice | None, dtype: str
) -> None:
    plan = plan_of(machine, dtype=chosen)
    assert [model.dtype for model in plan.models] == [dtype]
    assert argument(plan.processes[0].command, "--dtype") == dtype


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16 amx_tile\n", True),
        ("flags\t\t: avx512f avx512_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2\n", False),
        ("", False),
    ],
)
def test_the_flags_of_the_cpu_say_whether_it_multiplies_bfloat16(tmp_path: Path, text: str, found: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is found
    assert multiplies_bfloat16(tmp_path / "missing") is False


def test_many_cores_are_split_in_halves() -> None:
    machine = Machine(cores=[0, 1, 2, 5, 6, 7, 8, 9], has_gpu=False, cpu_bfloat16=True)
    assert machine.engine_cores == "0-2,5"
    assert machine.trainer_threads == 4


def test_the_context_is_the_smaller_of_the_models_and_the_cap() -> None:
    assert plan_of().models[0].context_length == 2048
    assert plan_of(max_model_len=100_000).models[0].context_length == 8192
    assert argument(plan_of(max_model_len=512).processes[0].command, "--max-model-len") == "512"


def test_two_models_get_engines_and_trainers_of_their_own() -> None:
    plan = plan_of(names=("small", "large"))
    names = ["engine-small", "engine-large", "trainer-small", "trainer-large", "gateway"]
    assert [process.name for process in plan.processes] == names
    assert [model.engines for model in plan.models] == [("http://127.0.0.1:9000",), ("http://127.0.0.1:9001",)]
    assert [process.environment["LOOPLINE_BASE_MODEL"] for process in plan.processes[2:4]] == ["small", "large"]


def test_engines_share_their_part_of_the_gpu_and_leave_the_rest_to_a_trainer_on_it() -> None:
    beside = plan_of(GPU_BOX, names=("small", "large")).processes[0]
    alone = plan_of(GPU_BOX, engine_gpus="0", trainer_gpus="1").processes[0]
    assert argument(beside.command, "--gpu-memory-utilization") == "0.3"
    assert argument(alone.command, "--gpu-memory-utilization") == "0.9"
    assert alone.environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_gpu_is_used_when_there_is_one_and_refused_when_there_is_none() -> None:
    assert choose_device(DeviceChoice.AUTO, GPU_BOX) == "gpu"
    assert choose_device(DeviceChoice.AUTO, TWO_CORES) == "cpu"
    with pytest.raises(ValueError, match="--device gpu: there is no NVIDIA device"):
        choose_device(DeviceChoice.GPU, TWO_CORES)


def test_each_process_gets_only_the_secrets_that_it_needs() -> None:
    parent = {
        "PATH": "/bin",
        "LOOPLINE_MASTER_KEY": "master",
        "LOOPLINE_ENGINE_KEY": "old",
        "LOOPLINE_DATABASE_URL": "postgresql+psycopg://u:p@h/d",
    }
    engine, trainer, gateway = (child_environment(parent, process) for process in plan_of().processes)
    assert (engine.get("LOOPLINE_MASTER_KEY"), engine.get("LOOPLINE_DATABASE_URL")) == (None, None)
    assert (trainer.get("LOOPLINE_MASTER_KEY"), trainer.get("LOOPLINE_ENGINE_KEY")) == (None, None)
    assert (gateway["LOOPLINE_MASTER_KEY"], gateway["LOOPLINE_ENGINE_KEY"]) == ("master", "engine-key")
    assert trainer["LOOPLINE_DATABASE_URL"] == gateway["LOOPLINE_DATABASE_URL"]


def test_the_engine_key_is_never_on_a_command_line() -> None:
    plans = [plan_of(engine=kind) for kind in EngineKind]
    commands = [" ".join(process.command) for plan in plans for process in plan.processes]
    assert len(commands) == 6
    assert not any("engine-key" in command for command in commands)


def test_the_catalogue_reads_back_as_it_was_planned() -> None:
    plan = plan_of(names=("small", "größer.1"), dtype=DTypeChoice.FLOAT32)
    assert list(parse_catalog(render_catalog(plan.models)).models.values()) == list(plan.models)


def test_facts_come_from_config_json_also_of_multimodal_models(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"vocab_size": 10, "max_position_embeddings": 20}')
    assert read_facts(tmp_path) == ModelFacts(vocab_size=10, context_length=20)
    config.write_text('{"text_config": {"vocab_size": 30, "max_position_embeddings": 40}}')
    assert read_facts(tmp_path) == ModelFacts(vocab_size=30, context_length=40)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no config.json in it"),
        ("{", "is not JSON"),
        ('{"vocab_size": 10}', "no usable max_position_embeddings: None"),
        ('{"vocab_size": "ten", "max_position_embeddings": 4}', "no usable vocab_size: 'ten'"),
    ],
)
def test_a_directory_without_these_facts_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelProblem, match=message):
        read_facts(tmp_path)


def test_a_model_is_named_after_its_source_or_as_it_was_said() -> None:
    assert parse_model("smollm2-135m-instruct").name == "smollm2-135m-instruct"
    assert parse_model("org/Some-Model-0.5B").name == "Some-Model-0.5B"
    assert parse_model("/srv/models/tiny/").name == "tiny"
    named = parse_model("mine=/srv/models/a b")
    assert (named.name, named.source) == ("mine", "/srv/models/a b")
    with pytest.raises(ModelProblem, match="give it one: --model NAME=/srv/models/a b"):
        parse_model("/srv/models/a b")


def test_a_server_that_listens_everywhere_is_reached_on_loopback() -> None:
    hosts = ["127.0.0.1", "0.0.0.0", "::", "::1", "example.org"]
    assert [reachable_host(host) for host in hosts] == ["127.0.0.1", "127.0.0.1", "[::1]", "[::1]", "example.org"]
