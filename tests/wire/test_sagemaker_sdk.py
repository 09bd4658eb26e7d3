"""The unmodified SageMaker SDK against the gateway with the scripted trainer and engine: what it sends is understood,
and what it gets is what it expects."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from sagemaker.train.training_session import (
    AdamParams,
    OperationError,
    SamplingParams,
    ServiceClient,
    TrainingClient,
    TrainingSessionError,
)

from gateway.core.scripted import BASE_FINGERPRINT, scripted_logprob
from tests.wire.gateways import Gateway
from tests.wire.sagemaker_clients import SDK_WARNINGS, datum, environment, service_client
from tests.wire.training import BASE

pytestmark = SDK_WARNINGS


@pytest.fixture(scope="module")
def service(gateway: Gateway) -> Iterator[ServiceClient]:
    with environment(gateway.url, gateway.keys.owner):
        yield service_client()


@pytest.fixture
def training(service: ServiceClient) -> Iterator[TrainingClient]:
    with service.create_lora_training_client(BASE, rank=8, alpha=16) as client:
        yield client


def test_a_step_is_pipelined_and_its_outputs_are_in_order(training: TrainingClient) -> None:
    first = training.forward_backward([datum(4), datum(6, token=40)])
    step = training.optim_step(AdamParams(learning_rate=0.005))
    again = training.forward([datum(4)])

    expected = [scripted_logprob(BASE_FINGERPRINT, token, token + 1) for token in range(97, 101)]
    outputs = first.result().loss_fn_outputs
    assert outputs[0]["logprobs"]["data"] == pytest.approx(expected)
    assert [len(output["logprobs"]["data"]) for output in outputs] == [4, 6]
    total = -sum(sum(output["logprobs"]["data"]) for output in outputs)
    assert first.result().metrics["loss"] == pytest.approx(total / 2)
    assert first.result().metrics["global_token_num"] == 10
    assert step.result().metrics["learning_rate"] == pytest.approx(0.005)
    assert sum(again.result().loss_fn_outputs[0]["logprobs"]["data"]) > sum(expected)


def step(training: TrainingClient) -> None:
    training.forward_backward([datum()])
    training.optim_step().result()


def loss(training: TrainingClient) -> float:
    return training.forward([datum()]).result().metrics["loss"]


def test_the_catalogue_is_listed_and_a_short_name_is_enough(service: ServiceClient) -> None:
    assert set(service.list_base_models()) == {BASE, "untrained"}


def test_a_saved_sampler_samples_and_scores(training: TrainingClient) -> None:
    step(training)
    sampler = training.save_weights_and_get_sampling_client("first")
    params = SamplingParams(temperature=1.0, seed=3, top_k=-1, stop=["zz"])
    answer = sampler.sample([97, 98, 99], 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    scores = sampler.compute_logprobs([97, 98, 99]).result()
    for sequence in answer.sequences:
        assert len(sequence.logprobs) == len(sequence.tokens) <= 512 - 3
        assert sequence.stop_reason in ("stop", "length")
    assert scores[0] is None
    assert answer.prompt_logprobs == [0.0, *scores[1:]]
    assert [len(row) for row in answer.topk_prompt_logprobs] == [0, 2, 2]


def test_the_base_model_answers_where_nothing_was_trained_and_not_in_place_of_what_was(service: ServiceClient) -> None:
    expected = [scripted_logprob(BASE_FINGERPRINT, 97, 98), scripted_logprob(BASE_FINGERPRINT, 98, 99)]
    with service.create_sampling_client(base_model=BASE) as sampler:  # asks for rank 32, which no engine here serves
        assert sampler.compute_logprobs([97, 98, 99]).result()[1:] == pytest.approx(expected)
    with service.create_lora_training_client(BASE, rank=8) as training:
        step(training)
        with pytest.raises(OperationError, match="no published version"):
            training.create_sampling_client().compute_logprobs([97, 98]).result()


def test_a_state_is_resumed_in_a_session_that_asked_for_another_rank(
    service: ServiceClient, training: TrainingClient
) -> None:
    before = loss(training)
    step(training)
    saved = loss(training)
    arn = training.save_state("after one").result().model_package_arn
    step(training)
    assert loss(training) < saved < before
    training.load_state_with_optimizer(arn).result()
    assert loss(training) == saved
    with service.create_training_client_from_state_with_optimizer(arn) as resumed:
        assert loss(resumed) == saved
        step(resumed)
        assert loss(resumed) < saved
    with service.create_training_client_from_state(arn) as fresh:
        assert loss(fresh) == before  # the scripted trainer's loss falls with the optimizer's steps alone


def test_packages_are_listed_by_kind_described_and_deleted(service: ServiceClient) -> None:
    group = f"group-{time.time_ns()}"
    service._get_model_registry_client().create_model_package_group(ModelPackageGroupName=group)
    arn = f"arn:aws:sagemaker:us-west-2:123456789012:model-package-group/{group}"
    with service.create_lora_training_client(BASE, rank=8, model_package_group_arn=arn) as training:
        step(training)
        model = training.save_weights_for_sampler("weights").result().model_package_arn
        merged = training.save_weights_for_sampler("merged", merge_weights=True).result().model_package_arn
        state = training.save_state("state").result().model_package_arn
        assert training.get_latest_model_package("checkpoint").model_package_arn == state
    listed = service.list_model_packages(model_package_group_arn=arn)
    assert [(one.model_package_arn, one.description) for one in listed] == [
        (state, "state"),
        (merged, "merged"),
        (model, "weights"),
    ]
    checkpoints = service.list_model_packages(kind="checkpoint", model_package_group_arn=arn)
    assert [one.model_package_arn for one in checkpoints] == [state]
    assert service.get_latest_model_package("model", model_package_group_arn=arn).model_package_arn == merged
    with service.create_sampling_client(model_package_arn=model) as sampler:
        assert len(sampler.sample([97], 2, SamplingParams(seed=1)).result().sequences) == 2
    service.delete_model_package(merged, delete_artifacts=True)
    service.delete_model_package(merged)
    left = service.list_model_packages(model_package_group_arn=arn, max_results=None)
    assert [one.model_package_arn for one in left] == [state, model]


def test_sessions_are_listed_stopped_twice_and_deleted(service: ServiceClient) -> None:
    name = f"listed-{time.time_ns()}"
    training = service.create_lora_training_client(BASE, rank=8, training_session_name=name)
    listed = service.list_sessions(name_contains=name, status_equals="Running")
    assert [one.training_session_name for one in listed] == [name]
    training.stop()
    service.stop_session(name)
    with pytest.raises(TrainingSessionError):
        training.forward([datum()])
    assert [one.status for one in service.list_sessions(name_contains=name)] == ["Stopped"]
    service.delete_session(name)
    assert service.list_sessions(name_contains=name) == []
    with service.create_lora_training_client(BASE, rank=8, training_session_name=name):
        assert len(service.list_sessions(name_contains=name, max_results=5)) == 1


def test_a_program_that_ends_without_a_word_stops_its_session(service: ServiceClient) -> None:
    name = f"left-{time.time_ns()}"
    program = (
        "from tests.wire.sagemaker_clients import service_client\n"
        f"training = service_client().create_lora_training_client({BASE!r}, rank=8, training_session_name={name!r})\n"
        "assert training.current_sequence_number == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)
    assert [one.status for one in service.list_sessions(name_contains=name)] == ["Stopped"]


def test_async_twins_give_the_same(service: ServiceClient) -> None:
    async def tour() -> list[float | None]:
        training = await service.create_lora_training_client_async(BASE, rank=8)
        forward = await training.forward_backward_async([datum()])
        stepped = await training.optim_step_async()
        assert (await forward).metrics["loss"] > 0
        assert (await stepped).metrics["learning_rate"] == pytest.approx(1e-4)
        sampler = await training.save_weights_and_get_sampling_client_async()
        answer = await sampler.sample_async([97, 98], 1, SamplingParams(seed=1))
        assert len(answer.sequences) == 1
        scores = await sampler.compute_logprobs_async([97, 98])
        training.stop()
        return scores

    scores = asyncio.run(tour())
    assert scores[0] is None
    assert -2 < scores[1] <= -1


def test_a_hundred_gathered_samples_are_heard_of_soon_after_the_engine_had_them(service: ServiceClient) -> None:
    async def draw(sampler: object, count: int) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(sampler.sample_async([97, index], 1, SamplingParams(seed=1)) for index in range(count)))
        return time.perf_counter() - started

    with service.create_sampling_client(base_model=BASE) as sampler:
        asyncio.run(draw(sampler, 1))
        seconds = asyncio.run(draw(sampler, 100))
    assert seconds < 20, seconds


def test_a_large_batch_comes_in_three_parts_and_steps_once(training: TrainingClient) -> None:
    data = [datum(3, token=10 + index % 200) for index in range(2500)]
    future = training.forward_backward(data)
    stepped = training.optim_step()
    result = future.result()
    assert training.current_sequence_number == 4
    assert len(result.loss_fn_outputs) == 2500
    assert result.loss_fn_outputs[2407]["logprobs"]["data"][0] == pytest.approx(
        scripted_logprob(BASE_FINGERPRINT, 17, 18)
    )
    total = -sum(sum(output["logprobs"]["data"]) for output in result.loss_fn_outputs)
    assert result.metrics["loss"] == pytest.approx(total / 2500)
    assert result.metrics["global_token_num"] == 7500
    assert "learning_rate" in stepped.result().metrics


def test_a_session_goes_on_after_numbers_that_were_burnt(training: TrainingClient) -> None:
    for rate in (-1.0, -2.0):
        with pytest.raises(Exception, match="learningRate"):  # botocore refuses; nothing is sent
            training.optim_step(AdamParams(learning_rate=rate)).result()
    step(training)
    assert training.current_sequence_number == 4


def test_a_refused_part_of_a_gradient_keeps_the_step_from_being_taken(training: TrainingClient) -> None:
    with pytest.raises(Exception, match="learningRate"):
        training.optim_step(AdamParams(learning_rate=-1.0)).result()  # a hole before what the server refuses
    training.forward_backward([datum()])
    refused = training.forward_backward([datum(token=254)])
    stepped = training.optim_step()
    with pytest.raises(Exception, match=r"datumList\[0\].modelInput\[2\] is 256"):
        refused.result()
    with pytest.raises(OperationError, match="incomplete"):
        stepped.result()
    step(training)
