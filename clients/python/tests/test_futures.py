"""One outcome, however it is waited for."""

import asyncio

import pytest

import loopline
from clients.python.tests.small_gateway import KEY, Network, SmallGateway
from loopline import Datum

DATUM = Datum([1, 2], {"target_tokens": [2, 3], "weights": [1.0, 1.0]})


async def test_await_result_and_result_async_give_the_same_object(training: loopline.TrainingClient) -> None:
    future = training.forward([DATUM])

    awaited = await future
    assert await future.result_async(timeout=5) is awaited
    assert future.result() is awaited
    assert future.done()
    assert future.exception() is None
    assert (future.cancel(), future.cancelled()) == (False, False)


async def test_every_async_twin_returns_the_same_kind_of_future(
    gateway: SmallGateway, service: loopline.ServiceClient
) -> None:
    async with await service.create_lora_training_client_async("tiny") as training:
        futures = [
            await training.forward_async([DATUM]),
            await training.forward_backward_async([DATUM]),
            await training.forward_backward_custom_async([DATUM], lambda data, logprobs: (logprobs[0].sum(), {})),
            await training.optim_step_async({"learning_rate": 0.1}),
            await training.save_state_async("s"),
            await training.load_state_async("demo@1"),
            await training.load_state_with_optimizer_async("demo@1"),
        ]
        names = [type(await future).__name__ for future in futures]
        sampler = await training.save_weights_and_get_sampling_client_async()
        assert (await sampler.sample_async([1])).version == sampler.version == "demo@9"
        assert await sampler.compute_logprobs_async([1, 2, 3]) == [None, -2.0, -2.0]

    assert names == [
        *["ForwardBackwardOutput"] * 3,
        "OptimStepResponse",
        "SaveStateResponse",
        *["LoadStateResponse"] * 2,
    ]
    assert [gateway.recorded[seq]["body"]["optimizer"] for seq in (7, 8)] == [False, True]
    assert gateway.stopped == 1


def test_a_wait_that_times_out_leaves_the_work_going_on(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    gateway.open.clear()
    future = training.optim_step()

    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0.01)
    gateway.open.set()
    assert future.result(timeout=30).optimizer_step == 1


async def test_cancelling_whoever_waits_does_not_cancel_the_work(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    gateway.open.clear()
    future = training.optim_step()
    waiting = asyncio.ensure_future(future.result_async())
    await asyncio.sleep(0)
    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(TimeoutError):
        await future.result_async(timeout=0.01)
    gateway.open.set()
    assert (await future).optimizer_step == 1


def test_closing_the_service_ends_every_wait(gateway: SmallGateway, network: Network) -> None:
    service = loopline.ServiceClient("http://gateway", KEY, transport=network)
    training = service.create_lora_training_client("tiny")
    gateway.open.clear()
    future = training.optim_step()
    assert future.operation_id == "op-1"

    gateway.open.set()  # a thread of the small gateway must not outlive it
    service.close()
    service.close()

    assert future.exception() is None or isinstance(future.exception(), loopline.ClientStopped)
    with pytest.raises(loopline.ClientStopped):
        training.optim_step()
    with pytest.raises(loopline.ClientStopped):
        service.create_sampling_client(base_model="tiny")
    with pytest.raises(loopline.ClientStopped):
        service.list_base_models()


def test_work_goes_on_when_only_the_future_is_kept(gateway: SmallGateway, network: Network) -> None:
    gateway.open.clear()
    future = (
        loopline.ServiceClient("http://gateway", KEY, transport=network)
        .create_lora_training_client("tiny")
        .forward([DATUM])
    )
    gateway.open.set()

    assert future.result(timeout=30).usage == {"train": 3}


def test_a_stopped_client_takes_no_more_calls(gateway: SmallGateway, service: loopline.ServiceClient) -> None:
    with service.create_lora_training_client("tiny") as training:
        saved = training.save_state()
        sampler = training.create_sampling_client()
    sampler.stop()

    assert saved.result().version == "demo@1"
    assert gateway.stopped == 1
    with pytest.raises(loopline.ClientStopped, match="optim_step: the client of session sess-1 was stopped"):
        training.optim_step()
    with pytest.raises(loopline.ClientStopped):
        sampler.sample([1])


def test_leaving_the_block_with_the_gateway_gone_hides_nothing(
    network: Network, service: loopline.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        with service.create_lora_training_client("tiny"):
            network.down = True
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()

    assert "session sess-1 could not be stopped" in caplog.text
