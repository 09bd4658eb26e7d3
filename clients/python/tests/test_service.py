"""The front door: settings, sessions, packages, tokenizers, and a loop written for another SDK."""

from pathlib import Path

import numpy as np
import pytest

import loopline
from clients.python.tests.small_gateway import KEY, Network, SmallGateway
from loopline import AdamParams, Datum, ModelInput, SamplingParams, TensorData


def test_settings_come_from_arguments_then_the_environment(
    gateway: SmallGateway, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOPLINE_API_KEY", raising=False)
    with pytest.raises(ValueError, match="no API key: pass api_key or set LOOPLINE_API_KEY"):
        loopline.ServiceClient("http://gateway")
    with pytest.raises(ValueError, match="must start with http"):
        loopline.ServiceClient("gateway:8000", KEY)
    monkeypatch.setenv("LOOPLINE_API_KEY", KEY)
    monkeypatch.setenv("LOOPLINE_BASE_URL", "http://gateway/")
    with loopline.ServiceClient(transport=network) as service:
        assert service.list_base_models() == ["Big", "tiny"]
        assert service.create_lora_training_client("tiny").session_id == "sess-1"
    with (
        loopline.ServiceClient("http://gateway", "tml-other", transport=network) as service,
        pytest.raises(loopline.Unauthenticated, match=r"on tiny: no such key \(401 invalid_api_key, request req-1\)"),
    ):
        service.create_lora_training_client("tiny")


def test_an_argument_that_means_nothing_is_refused_and_one_without_effect_warns(
    service: loopline.ServiceClient, training: loopline.TrainingClient
) -> None:
    with pytest.raises(TypeError, match="role_arn"):
        loopline.ServiceClient(role_arn="arn")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="unknown option kms_key_arn"):
        service.create_lora_training_client("tiny", kms_key_arn="arn")  # pyright: ignore[reportCallIssue]
    with pytest.warns(UserWarning, match="save_state: ttl_seconds, name has no effect"):
        training.save_state(ttl_seconds=5, name="x")


def test_session_options_reach_the_gateway_and_absent_ones_do_not(gateway: SmallGateway, network: Network) -> None:
    with loopline.ServiceClient(
        "http://gateway", KEY, transport=network, model_package_group="mine", session_name_prefix="run"
    ) as service:
        service.create_lora_training_client("tiny", rank=4, train_mlp=False, seed=3, user_metadata={"a": "b"})
        service.create_lora_training_client("tiny", training_session_name="n", model_package_group="g", train_attn=None)

    first, second = gateway.session_bodies
    assert first.pop("name").startswith("run-")
    lora = {"rank": 4, "train_mlp": False, "seed": 3}
    assert first == {"base_model": "tiny", "lora": lora, "model_package_group": "mine", "user_metadata": {"a": "b"}}
    assert second == {"base_model": "tiny", "name": "n", "lora": {}, "model_package_group": "g"}


def test_a_client_from_a_state_has_its_layout_and_has_loaded_it(
    gateway: SmallGateway, service: loopline.ServiceClient
) -> None:
    training = service.create_training_client_from_state_with_optimizer("demo@2", training_session_name="again")

    assert gateway.session_bodies == [
        {
            "base_model": "tiny",
            "name": "again",
            "lora": {"rank": 4, "alpha": 8.0, "train_attn": True, "train_mlp": False, "train_unembed": False},
        }
    ]
    assert gateway.recorded[1]["body"] == {"seq": 1, "version": "demo@2", "optimizer": True}
    assert training.current_sequence_number == 1
    with pytest.raises(ValueError, match="a version is written group@n here, got 'ver-1'"):
        service.create_training_client_from_state("ver-1")


def test_a_state_that_cannot_be_loaded_leaves_no_session_behind(
    gateway: SmallGateway, service: loopline.ServiceClient
) -> None:
    gateway.refuse = lambda kind, body: (400, "wrong_version_kind", "not a state")

    with pytest.raises(loopline.InvalidRequest, match="not a state"):
        service.create_training_client_from_state("demo@2")
    assert gateway.stopped == 1


def test_lists_are_paged_through_filtered_and_capped(service: loopline.ServiceClient) -> None:
    assert [session.id for session in service.list_sessions()] == ["sess-0", "sess-1", "sess-2"]
    assert [session.name for session in service.list_sessions(name_contains="2")] == ["run-2"]
    assert service.list_sessions(status_equals="Stopped") == []
    assert len(service.list_sessions(status_equals="Running", max_results=1)) == 1
    assert [package.address for package in service.list_model_packages()] == ["demo@3", "demo@2", "demo@1"]
    packages = service.list_model_packages(kind="adapter", model_package_group="demo", max_results=1)
    assert [package.model_package_arn for package in packages] == ["demo@3"]


def test_sampling_clients_need_exactly_one_target(gateway: SmallGateway, service: loopline.ServiceClient) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        service.create_sampling_client()
    with pytest.raises(ValueError, match="exactly one"):
        service.create_sampling_client(base_model="tiny", version="demo@1")

    base, pinned = (
        service.create_sampling_client(base_model="tiny"),
        service.create_sampling_client(model_package_arn="demo@2"),
    )
    assert base.sample([1, 2], include_prompt_logprobs=True).result().prompt_logprobs == [None, -1.0]
    alternatives = pinned.sample([1, 2], topk_prompt_logprobs=1).result().topk_prompt_logprobs
    assert alternatives == [None, [loopline.TokenLogprob(token_id=3, logprob=-0.1)]]
    assert [body.get("base_model") for _, body in gateway.samples] == ["tiny", None]
    assert [body.get("version") for _, body in gateway.samples] == [None, "demo@2"]
    assert pinned.get_base_model() == "tiny"


def test_targets_come_back_in_their_own_shape(gateway: SmallGateway, service: loopline.ServiceClient) -> None:
    sampler = service.create_sampling_client(version="demo@2")

    one = sampler.compute_target_logprobs([1, 2, 3], [4, 5, 6], temperature=0.5).result()
    many = sampler.compute_target_logprobs([1, 2], np.array([[4, 5, 6], [7, 8, 9]])).result()

    assert (one.dtype, one.shape, one.data) == ("float32", [3], [-4.0, -5.0, -6.0])
    assert many.tolist() == [[-4.0, -5.0, -6.0], [-7.0, -8.0, -9.0]]
    assert gateway.scores == [
        {"prompt": [1, 2, 3], "targets": [4, 5, 6], "temperature": 0.5, "version": "demo@2"},
        {"prompt": [1, 2], "alternatives": [[4, 5, 6], [7, 8, 9]], "temperature": 1.0, "version": "demo@2"},
    ]
    for wrong in ([4, 5], [[[4]], [[5]], [[6]]]):
        with pytest.raises(ValueError, match=r"targets must have shape \[3\]"):
            sampler.compute_target_logprobs([1, 2, 3], wrong)


def test_usage_is_the_gateways(service: loopline.ServiceClient) -> None:
    usage = service.get_usage(session_id="sess-1")

    assert (usage.total_cost_nanos, usage.data[0].session_id, usage.data[0].quantity) == (11, "sess-1", 5)


def test_the_tokenizer_comes_from_the_gateway_and_makes_strings_prompts(
    gateway: SmallGateway, training: loopline.TrainingClient, tmp_path: Path
) -> None:
    assert training.get_tokenizer().encode("a b a") == [0, 1, 0]
    assert training.get_tokenizer() is training.get_tokenizer()
    assert {path.name for path in tmp_path.rglob("*.json")} == {"tokenizer.json", "tokenizer_config.json"}

    training.forward(["a b"], loss_fn_inputs={"target_tokens": [1, 2], "weights": [1, 1]}).result()
    training.create_sampling_client().sample("c a").result()
    assert gateway.recorded[1]["body"]["data"][0]["model_input"] == [0, 1]
    assert gateway.samples[0][1]["prompt"] == [2, 0]


def test_a_loop_written_for_the_sagemaker_sdk_runs_with_another_service_client(
    gateway: SmallGateway, service: loopline.ServiceClient
) -> None:
    base_model = service.list_base_models()[1]
    with service.create_lora_training_client(base_model, rank=4, alpha=8, training_session_name="ported") as client:
        for _ in range(2):
            batch = [
                Datum(
                    model_input=ModelInput.from_ints([1, 2, 3]),
                    loss_fn_inputs={
                        "target_tokens": TensorData(data=[2, 3, 0], dtype="int64", shape=[3]),
                        "weights": TensorData(data=[1.0, 1.0, 0.0]),
                    },
                )
            ]
            backward = client.forward_backward(batch, loss_fn="cross_entropy", loss_fn_config={})
            step = client.optim_step(AdamParams(learning_rate=1e-3, beta2=0.999, eps=1e-8, weight_decay=0.01))
            assert backward.result(timeout=60).metrics
            assert step.result(timeout=60).metrics
        arn = client.save_weights_for_sampler(description="done", merge_weights=False).result().model_package_arn
        checkpoint = client.save_state(description="done").result().model_package_arn
        with client.create_sampling_client(arn) as sampler:
            params = SamplingParams(max_tokens=8, temperature=0.7, stop=["\n"])
            response = sampler.sample(ModelInput.from_ints([1, 2]), num_samples=2, sampling_params=params).result()
            assert [sequence.stop_reason for sequence in response.sequences] == ["length", "length"]
            assert sampler.compute_logprobs([1, 2]).result()[0] is None
    resumed = service.create_training_client_from_state(checkpoint, training_session_name="resumed")
    resumed.stop()

    assert gateway.kinds()[:6] == ["forward_backward", "optim_step"] * 2 + ["save_weights", "save_state"]
    assert gateway.samples[0][1]["stop"] == ["\n"]
