"""The unmodified ``tinker`` SDK against the gateway with the scripted trainer and engine: what it sends is understood,
and what it gets is what it expects."""

import math
import time
from collections.abc import Iterator

import pytest
import tinker
from tinker import types

from gateway.core.scripted import BASE_FINGERPRINT, scripted_logprob
from tests.wire.gateways import Gateway
from tests.wire.test_keys import key_of
from tests.wire.tinker_clients import (
    SDK_WARNINGS,
    datum,
    model_input,
    sdk_is_collected,
    tinker_service,
    training_client,
)
from tests.wire.training import BASE

__all__ = ["sdk_is_collected"]

pytestmark = SDK_WARNINGS

PARAMS = types.SamplingParams(max_tokens=6, seed=3)


@pytest.fixture(scope="module")
def service(gateway: Gateway) -> Iterator[tinker.ServiceClient]:
    with tinker_service(gateway, user_metadata={"run": "tests"}) as service:
        yield service


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return training_client(service)


def test_a_step_is_pipelined_and_its_outputs_are_in_order(training: tinker.TrainingClient) -> None:
    first = training.forward_backward([datum(4), datum(6, token=40)], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=0.5))
    again = training.forward([datum(4)], "cross_entropy")

    outputs = first.result().loss_fn_outputs
    expected = [scripted_logprob(BASE_FINGERPRINT, token, token + 1) for token in range(97, 101)]
    assert outputs[0]["logprobs"].tolist() == pytest.approx(expected)
    assert [len(output["logprobs"].tolist()) for output in outputs] == [4, 6]
    assert first.result().metrics["loss:sum"] == pytest.approx(-sum(o.sum() for o in map(_logprobs, outputs)))
    assert step.result().metrics["learning_rate:mean"] == 0.5
    assert _logprobs(again.result().loss_fn_outputs[0]).sum() > sum(expected)


def _logprobs(output: dict[str, types.TensorData]) -> "types.TensorData":
    return output["logprobs"].to_numpy()


def test_a_model_is_described_as_it_was_asked_for(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(BASE, rank=4, seed=11, user_metadata={"a": "b"}).result()
    info = training.get_info()
    assert info.lora_rank == 4
    assert info.model_data.model_name == BASE
    assert info.model_id.endswith(f":train:{info.model_id.rsplit(':', 1)[1]}")


def test_chunks_that_arrive_last_first_give_the_sum_of_all(training: tinker.TrainingClient) -> None:
    data = [datum(3, token=10 + index % 200) for index in range(2500)]
    future = training.forward_backward(data, "cross_entropy")
    step = training.optim_step(types.AdamParams())
    result = future.result()
    expected = [scripted_logprob(BASE_FINGERPRINT, 17, 18)]
    assert len(result.loss_fn_outputs) == 2500
    assert result.loss_fn_outputs[2407]["logprobs"].tolist()[:1] == pytest.approx(expected)
    assert step.result().metrics["learning_rate:mean"] == pytest.approx(1e-4)


def test_a_saved_sampler_samples_and_scores(service: tinker.ServiceClient) -> None:
    training = training_client(service, train_unembed=False)
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(types.AdamParams())
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = model_input([97, 98, 99])

    answer = sampler.sample(
        prompt, 3, PARAMS, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2
    ).result()
    scores = sampler.compute_logprobs(prompt).result()

    assert len({sequence.sequence_id for sequence in answer.sequences}) == 3
    for sequence in answer.sequences:
        assert sequence.logprobs is not None
        assert len(sequence.logprobs) == len(sequence.tokens) <= 6
        assert [len(row or []) for row in sequence.topk_logprobs or []] == [2] * len(sequence.tokens)
    assert answer.prompt_logprobs == scores
    assert scores[0] is None
    assert all(score is not None and -2 < score <= -1 for score in scores[1:])
    assert answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    assert [len(row or []) for row in answer.topk_prompt_logprobs[1:]] == [2, 2]


def test_an_adapter_on_the_unembedding_is_scored_by_the_trainer(training: tinker.TrainingClient) -> None:
    torch = pytest.importorskip("torch")
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = model_input([97, 98, 99, 100])
    scores = sampler.compute_logprobs(prompt).result()
    ids = torch.full((3, 2), -1, dtype=torch.int64)
    ids[1, 0], ids[1, 1] = 99, 7
    dense, sparse = types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)
    one = types.SamplingParams(max_tokens=1)
    answers = [
        sampler.sample(prompt, 1, one, target_prompt_logprobs=asked).result().target_prompt_logprobs
        for asked in (dense, sparse)
    ]
    assert answers[0] is not None
    assert answers[1] is not None
    assert answers[1].sparse_crow_indices == sparse.sparse_crow_indices
    rows = answers[0].to_torch()
    assert rows[1, 0].item() == pytest.approx(scores[2])
    assert rows[0].tolist() == rows[2].tolist() == [0.0, 0.0]
    assert answers[1].to_torch().tolist() == rows.tolist()
    answer = sampler.sample(prompt, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert answer.prompt_logprobs == scores
    assert answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    for ranked in answer.topk_prompt_logprobs[1:]:
        assert [logprob for _, logprob in ranked or []] == pytest.approx([-1.0, -1.0], abs=0.05)  # the best of 256


def test_a_base_model_is_sampled_without_training(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE).result()
    scores = sampler.compute_logprobs(model_input([97, 98, 99])).result()
    assert scores[1:] == pytest.approx(
        [scripted_logprob(BASE_FINGERPRINT, 97, 98), scripted_logprob(BASE_FINGERPRINT, 98, 99)]
    )
    assert sampler.get_base_model() == BASE


def test_a_state_is_loaded_into_the_same_and_into_a_new_model(
    gateway: Gateway, training: tinker.TrainingClient
) -> None:
    def loss(client: tinker.TrainingClient) -> float:
        return client.forward([datum()], "cross_entropy").result().metrics["loss:sum"]

    def step(client: tinker.TrainingClient) -> None:
        client.forward_backward([datum()], "cross_entropy")
        client.optim_step(types.AdamParams()).result()

    before = loss(training)
    step(training)
    saved = loss(training)
    path = training.save_state("after-one").result().path
    assert path == f"tinker://{training.model_id}/weights/after-one"
    step(training)
    assert loss(training) < saved < before
    assert training.load_state_with_optimizer(path).result().path == path
    assert loss(training) == saved

    with tinker_service(gateway) as other:
        resumed = other.create_training_client_from_state_with_optimizer(path).result()
        assert loss(resumed) == saved
        assert resumed.get_info().lora_rank == 8
        fresh = other.create_training_client_from_state(path).result()
        assert loss(fresh) == before  # the scripted trainer's loss falls with the optimizer's steps alone
        step(resumed)
        assert loss(resumed) < saved


def test_a_named_checkpoint_is_sampled_by_its_path(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(types.AdamParams())
    path = training.save_weights_for_sampler("final").result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/final"
    sampler = service.create_sampling_client(model_path=path).result()
    assert len(sampler.sample(model_input([97]), 2, PARAMS).result().sequences) == 2
    assert not math.isnan(sampler.compute_logprobs(model_input([97, 98])).result()[1] or math.nan)


def test_the_catalogue_is_what_the_server_can_do(gateway: Gateway) -> None:
    rest = tinker.RestClient(base_url=f"{gateway.url}/tinker", api_key=gateway.keys.owner)
    models = {m.model_name: m for m in rest.get_server_capabilities().result().supported_models}
    assert set(models) == {BASE, "untrained"}
    assert models[BASE].max_context_length == 512
    assert (models[BASE].trainable, models[BASE].sampleable, models["untrained"].sampleable) == (True, True, False)


def test_a_copy_of_a_sampler_has_a_number_of_its_own(
    gateway: Gateway, service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", gateway.keys.owner)
    sampler = service.create_sampling_client(base_model=BASE).result()
    copies = [tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle()) for _ in range(2)]
    clients = [sampler, *copies]
    drawn = [client.sample(model_input([97]), 1, PARAMS).result().sequences[0] for client in clients]
    assert len({sequence.sequence_id for sequence in drawn}) == 3
    assert drawn[0].tokens == drawn[1].tokens == drawn[2].tokens


def test_an_inflight_sampler_follows_and_a_snapshot_stays(training: tinker.TrainingClient) -> None:
    def step() -> None:
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(types.AdamParams()).result()

    prompt = model_input([97, 98, 99])
    step()
    snapshot = training.save_weights_and_get_sampling_client().result()
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    first = snapshot.compute_logprobs(prompt).result()
    assert inflight.compute_logprobs(prompt).result() == first
    step()
    newer = training.save_weights_and_get_sampling_client(kind="inflight").result()
    second = newer.compute_logprobs(prompt).result()
    assert second != first
    assert inflight.compute_logprobs(prompt).result() == second
    assert snapshot.compute_logprobs(prompt).result() == first


def test_what_a_sampler_stays_with_is_deleted_by_force_and_then_refused(
    gateway: Gateway, training: tinker.TrainingClient
) -> None:
    sampler = training.save_weights_and_get_sampling_client().result()
    training.save_weights_and_get_sampling_client().result()
    with gateway.client() as client:
        session = client.get("/versions", params={"limit": 1}).json()["data"][0]["group"]
        refused = client.delete(f"/model_packages/{session}/1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_in_use")
        assert "sampler" in refused.json()["error"]["message"]
        assert sampler.sample(model_input([97]), 1, PARAMS).result().sequences
        assert client.delete(f"/model_packages/{session}/1", params={"force": True}).status_code == 200
    with pytest.raises(tinker.RequestFailedError, match="was deleted"):
        sampler.sample(model_input([97]), 1, PARAMS).result()


def test_a_custom_loss_steps_on_its_own_gradient(training: tinker.TrainingClient) -> None:
    torch = pytest.importorskip("torch")
    seen: list[float] = []

    def squared(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = sum((row**2).sum() for row in logprobs)
        seen.append(float(loss.detach()))
        return loss, {"rows": float(len(data))}

    future = training.forward_backward_custom([datum(4), datum(2)], squared)
    step = training.optim_step(types.AdamParams())
    metrics = future.result().metrics
    assert metrics["loss:sum"] == pytest.approx(seen[0])
    assert metrics["rows"] == 2.0
    # Round two is a cross entropy whose weights are the gradient's negatives: 2 lp each, so its loss is -sum(w lp).
    assert metrics["surrogate_loss:sum"] == pytest.approx(2 * seen[0], rel=1e-5)
    assert step.result().metrics["learning_rate:mean"] == pytest.approx(1e-4)


def test_alternatives_are_sent_sparse_and_scored_densely(training: tinker.TrainingClient) -> None:
    torch = pytest.importorskip("torch")
    targets, weights = torch.zeros(8, 4, dtype=torch.int64), torch.zeros(8, 4)
    targets[2, 1], weights[2, 1] = 99, 0.25
    data = types.Datum(
        model_input=model_input(range(97, 105)), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    assert data.loss_fn_inputs["weights"].sparse_crow_indices is not None
    result = training.forward([data], "cross_entropy").result()
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_torch()
    assert logprobs.shape == (8, 4)
    assert float(logprobs[2, 1]) == pytest.approx(scripted_logprob(BASE_FINGERPRINT, 99, 99))
    assert result.metrics["loss:sum"] == pytest.approx(-0.25 * float(logprobs[2, 1]))


def test_out_of_budget_is_told_within_seconds_and_runs_nothing(gateway: Gateway) -> None:
    key = key_of(gateway)
    with tinker_service(gateway, key) as service, gateway.client() as native:
        training = training_client(service)
        sampler = service.create_sampling_client(base_model=BASE)
        native.put(f"/budgets/key/{key.split('-')[1]}", json={"hard_nanos": 1}).raise_for_status()
        began = time.monotonic()
        with pytest.raises(tinker.APIStatusError) as refused:
            training.forward_backward([datum()], "cross_entropy").result()
        assert refused.value.status_code == 402
        with pytest.raises(tinker.TinkerError) as failed:
            sampler.sample(model_input([97]), 1, PARAMS).result()
        assert "budget" in str(failed.value)
        assert time.monotonic() - began < 60
        assert native.get(f"/sessions/{training.model_id}/operations").json()["data"] == []


def test_other_dialects_find_the_model_by_its_id(gateway: Gateway, training: tinker.TrainingClient) -> None:
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(types.AdamParams())
    training.save_weights_for_sampler("here").result()
    training.save_weights_and_get_sampling_client().result()
    with gateway.client() as native, gateway.openai_client() as openai:
        session = native.get(f"/sessions/{training.model_id}").json()
        body = {"model": training.model_id, "prompt": [97], "max_tokens": 3, "seed": 1}
        live = openai.post("/completions", json=body)
        named = openai.post(
            "/completions", json={**body, "model": f"tinker://{training.model_id}/sampler_weights/here"}
        )
    assert session["optimizer_step"] == 1
    assert live.status_code == named.status_code == 200
    assert live.json()["choices"][0]["text"] == named.json()["choices"][0]["text"]
