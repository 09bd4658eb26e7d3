"""The `loopline` SDK against the real gateway, the real trainer and vLLM, on the tiny float32 model."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import openai
import pytest
import torch

import loopline
from loopline import AdamParams, Datum, SamplingParams
from tests.stack import EngineEndpoint, Stack, running_stack

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
STEP = AdamParams(learning_rate=2e-3)
TEXT = "zorblax quimtel vrandoo pelk zorblax quimtel vrandoo pelk"


@pytest.fixture(scope="module")
def stack(tiny_engine: EngineEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tiny_engine, tmp_path_factory.mktemp("sdk-stack")) as running:
        yield running


@pytest.fixture(scope="module")
def service(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[loopline.ServiceClient]:
    with loopline.ServiceClient(stack.url, stack.key, cache_dir=tmp_path_factory.mktemp("cache")) as client:
        yield client


@pytest.fixture
def training(stack: Stack, service: loopline.ServiceClient) -> Iterator[loopline.TrainingClient]:
    with service.create_lora_training_client(stack.base_model, rank=8, alpha=16, seed=7) as client:
        yield client


def datum(tokens: Sequence[int]) -> Datum:
    tokens = list(tokens)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})


def test_a_trained_unembedding_is_scored_by_the_trainer(stack: Stack, service: loopline.ServiceClient) -> None:
    tokens = service.create_sampling_client(base_model=stack.base_model).get_tokenizer().encode(TEXT)
    with service.create_lora_training_client(stack.base_model, rank=8, seed=3, train_unembed=True) as training:
        training.forward_backward([datum(tokens)])
        training.optim_step(STEP)
        sampler = training.save_weights_and_get_sampling_client()
        trained = training.forward([datum(tokens)]).result().loss_fn_outputs[0]["logprobs"].data

        assert sampler.compute_logprobs(tokens).result()[1:] == pytest.approx(trained, abs=1e-5)
        warm = sampler.compute_target_logprobs(tokens[:1], [tokens[:3]], temperature=2.0).result().tolist()[0]
        cold = sampler.compute_target_logprobs(tokens[:1], [tokens[:3]]).result().tolist()[0]
        assert warm[0] - warm[1] == pytest.approx((cold[0] - cold[1]) / 2, abs=1e-4)


def test_a_text_becomes_likelier_to_trainer_sampler_and_openai_client(
    stack: Stack, training: loopline.TrainingClient
) -> None:
    tokens = training.get_tokenizer().encode(TEXT)
    chat = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key)
    scores: list[float] = []
    for _ in range(3):
        futures = [(training.forward_backward([datum(tokens)]), training.optim_step(STEP)) for _ in range(4)]
        sampler = training.save_weights_and_get_sampling_client()
        losses = [backward.result().metrics["loss:sum"] for backward, _ in futures]
        scored = sampler.compute_logprobs(tokens).result()
        trained = training.forward([datum(tokens)]).result().loss_fn_outputs[0]["logprobs"].data
        answered = chat.completions.create(
            model=training.session_id, prompt=tokens, max_tokens=0, echo=True, logprobs=0, temperature=1
        )

        assert losses == sorted(losses, reverse=True)
        assert scored[0] is None
        sampled = [logprob for logprob in scored[1:] if logprob is not None]
        by_trainer = sampler.compute_target_logprobs(tokens[:-1], tokens[1:]).result()
        assert by_trainer.data == pytest.approx(sampled, abs=1e-4)
        assert by_trainer.data == pytest.approx(trained, abs=1e-5)
        assert max(abs(p - q) for p, q in zip(trained, sampled, strict=True)) < 1e-3
        logprobs = answered.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[1:] == pytest.approx(sampled, abs=1e-3)
        scores.append(sum(sampled))

    assert scores == sorted(scores)
    assert scores[2] > scores[0] + 5.0


def test_samples_carry_the_version_and_the_logprobs_of_the_trainer(training: loopline.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client("first")
    prompt = [1000, 2000, 3000]

    answer = sampler.sample(prompt, 4, SamplingParams(max_tokens=6, seed=5, ignore_eos=True)).result()
    again = sampler.sample(prompt, 4, SamplingParams(max_tokens=6, seed=5, ignore_eos=True)).result()

    assert answer.version == sampler.version == f"{training.model_package_group}@1"
    assert [sequence.tokens for sequence in again.sequences] == [sequence.tokens for sequence in answer.sequences]
    assert len({tuple(sequence.tokens) for sequence in answer.sequences}) == 4
    batch = [datum(prompt + sequence.tokens) for sequence in answer.sequences]
    outputs = training.forward(batch).result().loss_fn_outputs
    for sequence, output in zip(answer.sequences, outputs, strict=True):
        assert output["logprobs"].data[-6:] == pytest.approx(sequence.logprobs, abs=1e-3)
    assert answer.usage["sample"] == 24
    assert answer.cost_nanos > 0


def test_seeded_samples_of_more_prompt_tokens_than_one_engine_step_holds_all_come_back(
    stack: Stack, service: loopline.ServiceClient
) -> None:
    sampler = service.create_sampling_client(base_model=stack.base_model)
    params = SamplingParams(max_tokens=2, seed=9, ignore_eos=True)
    prompts = [[1000 + 700 * number + position for position in range(600)] for number in range(16)]

    answers = [future.result() for future in [sampler.sample(prompt, 2, params) for prompt in prompts]]

    assert [len(sequence.tokens) for answer in answers for sequence in answer.sequences] == [2] * 32


def test_a_custom_loss_trains_exactly_as_the_built_in_one_it_equals(
    stack: Stack, service: loopline.ServiceClient
) -> None:
    batch = [datum([11, 12, 13, 14]), datum([21, 22, 23])]

    def cross_entropy(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(list(logprobs)).sum(), {"mine:sum": 1.0}

    finals: list[list[float]] = []
    for custom in (False, True):
        with service.create_lora_training_client(stack.base_model, rank=8, seed=3) as training:
            seen = training.forward(batch).result()
            if custom:
                output = training.forward_backward_custom(batch, cross_entropy).result()
                assert output.metrics["mine:sum"] == 1.0
                assert output.metrics["loss:sum"] == pytest.approx(output.metrics["surrogate_loss:sum"], rel=1e-5)
            else:
                output = training.forward_backward(batch).result()
            logprobs = [[list(o["logprobs"].data) for o in result.loss_fn_outputs] for result in (seen, output)]
            assert logprobs[0] == logprobs[1]
            training.optim_step(STEP)
            outputs = training.forward(batch).result().loss_fn_outputs
            finals.append([value for output in outputs for value in output["logprobs"].data])

    assert finals[0] == finals[1]


def test_a_batch_cut_into_chunks_gives_the_gradient_of_the_whole(stack: Stack, service: loopline.ServiceClient) -> None:
    batch = [datum([30 + n % 50, 31 + n % 50, 32]) for n in range(1030)]
    norms: list[float] = []
    for pieces in ([batch], [batch[:500], batch[500:]]):
        with service.create_lora_training_client(stack.base_model, rank=8, seed=3) as training:
            outputs = [training.forward_backward(piece) for piece in pieces]
            assert sum(len(output.result().loss_fn_outputs) for output in outputs) == 1030
            assert len([name for output in outputs for name in output.operation_ids]) == 2
            norms.append(training.optim_step(STEP).result().metrics["grad_norm:mean"])

    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_resumed_session_goes_on_where_the_saved_one_stood(
    service: loopline.ServiceClient, training: loopline.TrainingClient
) -> None:
    batch = [datum([41, 42, 43, 44])]
    training.forward_backward(batch)
    training.optim_step(STEP)
    state = training.save_state("half way").result()
    for client in (training, service.create_training_client_from_state_with_optimizer(state.version)):
        client.forward_backward(batch)
        assert client.optim_step(STEP).result().optimizer_step == 2
    resumed = service.create_training_client_from_state(state.version)
    resumed.forward_backward(batch)

    assert resumed.optim_step(STEP).result().optimizer_step == 1
    assert training.load_state(state.version).result().discarded_gradient is False
    assert state.model_package_arn == f"{training.model_package_group}@1"
    packages = service.list_model_packages(model_package_group=training.model_package_group)
    assert [(package.kind, package.description) for package in packages] == [("state", "half way")]


def test_a_refusal_names_the_call_and_leaves_the_session_going(training: loopline.TrainingClient) -> None:
    with pytest.raises(loopline.InvalidRequest, match=r"forward_backward \(seq 1 of .*data\[1\]") as caught:
        training.forward_backward([datum([1, 2, 3]), datum([1, 999_999])]).result()
    assert caught.value.code == "token_out_of_vocabulary"
    assert caught.value.details["datum"] == 1
    with pytest.raises(loopline.OperationError, match=r"optim_step .* \(seq 1 of .*empty_window"):
        training.optim_step().result()
    with pytest.raises(loopline.Conflict, match="no_published_version"):
        training.create_sampling_client().sample([1], 1, SamplingParams(max_tokens=1)).result()

    assert math.isfinite(training.forward_backward([datum([1, 2, 3])]).result().metrics["loss:sum"])
    assert training.current_sequence_number == 2


def test_a_stopped_session_is_listed_as_such_and_its_bill_stays(stack: Stack, service: loopline.ServiceClient) -> None:
    with service.create_lora_training_client(stack.base_model, training_session_name="billed", rank=4) as training:
        training.forward_backward([datum(range(10, 30))]).result()
        session = training.session_id

    (listed,) = service.list_sessions(name_contains="billed")
    assert (listed.id, listed.status) == (session, "stopped")
    (line,) = service.get_usage(session_id=session).data
    assert (line.meter, line.quantity) == ("train", 19)
    assert line.cost_nanos > 0
    service.stop_session("billed")


@pytest.mark.parametrize("page", ["docs/clients/python.md", "clients/python/README.md"])
def test_the_first_example_of_the_docs_runs_as_printed(
    stack: Stack, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOOPLINE_BASE_URL", stack.url)
    monkeypatch.setenv("LOOPLINE_API_KEY", stack.key)
    (example, *_) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    example = example.replace("smollm2-135m-instruct", stack.base_model)
    exec(example.replace("http://127.0.0.1:8000", stack.url).replace("tml-...", stack.key), {})

    assert "@1" in capsys.readouterr().out


async def test_the_same_loop_runs_under_asyncio(stack: Stack, service: loopline.ServiceClient) -> None:
    async with await service.create_lora_training_client_async(stack.base_model, rank=8, seed=1) as training:
        backward = await training.forward_backward_async([datum([51, 52, 53])])
        step = await training.optim_step_async(STEP)
        assert (await step).optimizer_step == 1
        assert (await backward).metrics["loss_tokens:sum"] == 2
        sampler = await training.save_weights_and_get_sampling_client_async()
        answer = await sampler.sample_async([51, 52], sampling_params=SamplingParams(max_tokens=1, temperature=0))
        assert len(answer.sequences[0].tokens) == 1
        base = service.create_sampling_client(base_model=stack.base_model)
        assert (await base.compute_logprobs_async([51, 52, 53]))[2] != (
            await sampler.compute_logprobs_async([51, 52, 53])
        )[2]
