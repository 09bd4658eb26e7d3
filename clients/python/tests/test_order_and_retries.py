"""Work is done once and in order, whatever the network does."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import loopline
from clients.python.tests.small_gateway import Network, SmallGateway
from loopline import Datum

DATUM = Datum([1, 2], {"target_tokens": [2, 3], "weights": [1.0, 1.0]})


@pytest.mark.parametrize("loss", ["request", "reply", "502", "503", "429"])
def test_a_retried_submit_is_recorded_once_under_its_seq(
    gateway: SmallGateway, network: Network, training: loopline.TrainingClient, loss: Any
) -> None:
    network.trouble.extend([loss, loss])

    training.forward_backward([DATUM]).result()
    training.optim_step().result()

    assert gateway.kinds() == ["forward_backward", "optim_step"]
    assert gateway.arrivals[-1] == ("optim_step", 2)


def test_pipelined_calls_are_recorded_in_the_order_they_were_made(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    gateway.open.clear()
    futures: list[loopline.APIFuture[Any]] = []
    for _ in range(20):
        futures += [training.forward_backward([DATUM]), training.optim_step()]
    last = training.save_weights_for_sampler()

    assert last.operation_id == "op-41"
    assert not any(future.done() for future in futures)
    gateway.open.set()
    assert last.result().version == "demo@41"
    assert gateway.kinds() == ["forward_backward", "optim_step"] * 20 + ["save_weights"]
    assert [future.operation_id for future in futures] == [f"op-{seq}" for seq in range(1, 41)]


def test_each_threads_calls_keep_their_order(gateway: SmallGateway, training: loopline.TrainingClient) -> None:
    def work(name: int) -> None:
        for step in range(10):
            training.save_state(f"{name}:{step}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    training.optim_step().result()

    told = [gateway.recorded[seq]["body"]["description"].split(":") for seq in range(1, 41)]
    for name in "0123":
        assert [int(step) for who, step in told if who == name] == list(range(10))


def test_a_refused_call_leaves_its_seq_to_the_next(gateway: SmallGateway, training: loopline.TrainingClient) -> None:
    gateway.refuse = lambda kind, body: (400, "invalid_request", "no") if kind == "forward" else None

    refused = training.forward([DATUM])
    saved = training.save_state()

    with pytest.raises(loopline.InvalidRequest, match=r"^forward \(seq 1 of sess-1\): no \(400 invalid_request"):
        refused.result()
    assert saved.result().number == 1
    with pytest.raises(loopline.InvalidRequest):
        _ = refused.operation_id


def test_after_a_lost_outcome_the_sessions_record_tells_the_next_seq(
    gateway: SmallGateway, network: Network, training: loopline.TrainingClient
) -> None:
    network.trouble.extend(["reply"] * 200)  # it arrives, and nobody ever hears of it

    with pytest.raises(loopline.ConnectionFailed, match=r"save_state \(seq 1 of sess-1\): no answer from"):
        training.save_state().result()
    network.trouble.clear()

    assert training.save_state().result().number == 2
    assert gateway.kinds() == ["save_state", "save_state"]


def test_after_a_gateway_that_was_never_reached_the_seq_is_still_free(
    gateway: SmallGateway, network: Network, training: loopline.TrainingClient
) -> None:
    network.down = True
    with pytest.raises(loopline.ConnectionFailed) as caught:
        training.save_state().result()
    network.down = False

    assert loopline.is_retryable(caught.value)
    assert training.save_state().result().number == 1
    assert training.current_sequence_number == 1


def test_waits_grow_with_jitter_to_a_cap_and_end_at_the_deadline(
    network: Network, time: Any, training: loopline.TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    network.down = True
    with pytest.raises(loopline.ConnectionFailed):
        training.save_state().result()

    assert time.slept[:5] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert 60.0 <= time.now < 68.0
    assert [record.getMessage() for record in caplog.records if record.name == "loopline"] == [
        "save_state (seq 1 of sess-1): no answer (nobody there); trying again for up to 60 s"
    ]


def test_many_calls_that_wait_for_one_gateway_say_so_once(
    network: Network, training: loopline.TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    network.trouble.extend(["503"] * 6)
    sampler = training.create_sampling_client()
    for future in [sampler.sample([1]) for _ in range(6)]:
        future.result()

    assert [record.name for record in caplog.records].count("loopline") == 1


def test_the_gateways_retry_after_is_the_least_wait(
    network: Network, time: Any, training: loopline.TrainingClient
) -> None:
    network.trouble.extend(["429", "503"])
    training.save_state().result()

    assert time.slept == [3.0, 3.0]


def test_a_step_called_behind_a_refused_backward_pass_is_not_sent(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    gateway.refuse = lambda kind, body: (400, "invalid_request", "no") if body["seq"] == 2 else None
    first, second, step = (
        training.forward_backward([DATUM]),
        training.forward_backward([DATUM]),
        training.optim_step(),
    )

    first.result()
    with pytest.raises(loopline.InvalidRequest):
        second.result()
    with pytest.raises(loopline.IncompleteGradient, match="optim_step of sess-1 was not sent"):
        step.result()
    assert gateway.kinds() == ["forward_backward"]
    gateway.refuse = lambda kind, body: None
    assert training.optim_step().result().optimizer_step == 1


def test_a_failed_operation_is_named_and_the_next_goes_on(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    error = {"code": "non_finite", "kind": "invalid", "message": "loss is inf", "field": None, "details": {"datum": 0}}
    gateway.fail = lambda kind, body: error if kind == "forward_backward" else None
    failing, step = training.forward_backward([DATUM]), training.optim_step()

    with pytest.raises(loopline.OperationError) as caught:
        failing.result()
    assert str(caught.value) == "forward_backward op-1 (seq 1 of sess-1) failed: loss is inf (non_finite)"
    assert (caught.value.operation_id, caught.value.seq, caught.value.details) == ("op-1", 1, {"datum": 0})
    assert not loopline.is_retryable(caught.value)
    assert step.result().metrics == {"grad_norm:mean": 0.5}


def test_a_sample_whose_reply_was_lost_is_drawn_once(
    gateway: SmallGateway, network: Network, training: loopline.TrainingClient
) -> None:
    sampler = training.create_sampling_client("demo@3")
    network.trouble.extend(["reply", "503"])

    answer = sampler.sample([1, 2], 2, loopline.SamplingParams(max_tokens=2)).result()

    assert len(gateway.samples) == 1
    assert (answer.id, answer.version, len(answer.sequences)) == ("smp-1", "demo@3", 2)


def test_samples_run_together_but_no_more_than_the_limit(
    gateway: SmallGateway, training: loopline.TrainingClient
) -> None:
    sampler = training.create_sampling_client()

    answers = [future.result() for future in [sampler.sample([1]) for _ in range(40)]]

    assert len({answer.id for answer in answers}) == 40
    assert 2 <= gateway.most_sampling <= 4
