"""The weights that the SDK's custom losses lead to, against transformers, PEFT and torch's own AdamW in float32.

The real trainer stands behind the gateway. Optimizer parameters are chosen so that a step is nearly the gradient
itself: with eps far above it, Adam divides by a constant.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tinker import types
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.stack import EngineEndpoint, Stack, running_stack
from tests.wire.tinker_clients import SDK_WARNINGS, sdk_is_collected

__all__ = ["sdk_is_collected"]

pytestmark = [*SDK_WARNINGS, pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")]

WARM = types.AdamParams(learning_rate=1e-3)
STEP = types.AdamParams(learning_rate=1e5, beta1=0.9, beta2=0.95, eps=1000.0)
"""The step that is compared: large, so that float32 holds the difference of two weights to six digits."""
SEQUENCES = ([1000, 2000, 3000, 4000, 5000, 6000], [17, 4711, 9], [300, 301, 302, 303])


@pytest.fixture(scope="module")
def stack(
    scripted_engine: EngineEndpoint, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The real trainer; nothing here is sampled, so the engine has nothing to do."""
    endpoint = replace(scripted_engine, model_path=tiny_model, vocab_size=49152, max_lora_rank=8)
    with running_stack(endpoint, tmp_path_factory.mktemp("gradients")) as running:
        yield running


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    service = tinker.ServiceClient(base_url=f"{stack.url}/tinker", api_key=stack.key)
    yield service
    service.close("success").result()


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = torch.exp(logprobs - old)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / logprobs.shape[0]
    return loss, {"custom/ratio:mean": ratio.mean()}


def datum(tokens: list[int], seed: int) -> types.Datum:
    generator = torch.Generator().manual_seed(seed)
    length = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "old": types.TensorData.from_torch(-10 * torch.rand(length, generator=generator)),
            "advantages": types.TensorData.from_torch(torch.randn(length, generator=generator)),
        },
    )


DATA = [datum(tokens, seed) for seed, tokens in enumerate(SEQUENCES)]


def of_all(data: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The same loss as a callable: it sees every datum at once."""
    losses = [
        clipped(row, *(each.loss_fn_inputs[name].to_torch() for name in ("old", "advantages")))[0]
        for each, row in zip(data, logprobs, strict=True)
    ]
    return torch.stack(losses).sum(), {"rows": float(len(losses))}


Submit = Callable[[tinker.ServiceClient, tinker.TrainingClient], Any]


def as_callable(service: tinker.ServiceClient, training: tinker.TrainingClient) -> Any:
    return training.forward_backward_custom(DATA, of_all)


def as_graph(service: tinker.ServiceClient, training: tinker.TrainingClient) -> Any:
    handle = service.create_custom_loss(clipped, {"logprobs": 1, "old": 1, "advantages": 1}).result()
    assert handle.loss_id is not None
    return training.forward_backward_custom(DATA, handle)


def fetched(service: tinker.ServiceClient, training: tinker.TrainingClient, name: str, directory: Path) -> Path:
    """Save the adapter for outside and download it."""
    path = training.save_weights_external(name).result().path
    directory.mkdir()
    links = service.create_rest_client().get_external_weights_urls(path).result()
    for file, url in links.urls.items():
        (directory / file).write_bytes(httpx.get(url, timeout=60).raise_for_status().content)
    return directory


def stepped(base: Path, adapter: Path) -> Mapping[str, Tensor]:
    """Take the step with transformers, PEFT and torch from the adapter in ``adapter``; return its tensors."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    rows = []
    for tokens in SEQUENCES:
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    loss, _ = of_all(DATA, rows)
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.AdamW(
        trained, lr=STEP.learning_rate, betas=(STEP.beta1, STEP.beta2), eps=STEP.eps, weight_decay=0.0
    ).step()
    model.save_pretrained(adapter.parent / "stepped", save_embedding_layers=False)
    return load_file(adapter.parent / "stepped" / "adapter_model.safetensors")


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()


@pytest.fixture(scope="module")
def deltas(
    stack: Stack, service: tinker.ServiceClient, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Tensor, float]]:
    """What one step moved, and the loss that was reported: of each way to submit it, and of plain torch."""
    found: dict[str, tuple[Tensor, float]] = {}
    for name, submit in {"callable": as_callable, "graph": as_graph}.items():
        work = tmp_path_factory.mktemp(name)
        training = service.create_lora_training_client(stack.base_model, rank=8, seed=5).result()
        warm = types.Datum(
            model_input=types.ModelInput.from_ints(SEQUENCES[0][:-1]),
            loss_fn_inputs={"target_tokens": SEQUENCES[0][1:], "weights": [1.0] * 5},
        )
        training.forward_backward([warm], "cross_entropy")
        training.optim_step(WARM).result()
        training.load_state(training.save_state("warm").result().path).result()  # with fresh moments
        before = fetched(service, training, "before", work / "before")
        output = submit(service, training)
        training.optim_step(STEP).result()
        after = fetched(service, training, "after", work / "after")
        loaded = [load_file(path / "adapter_model.safetensors") for path in (before, after)]
        found[name] = (flat(loaded[1]) - flat(loaded[0]), output.result().metrics["loss:sum"])
        if name == "graph":
            plain = stepped(tiny_model, before)
            assert plain.keys() == loaded[0].keys()
            found["plain"] = (flat(plain) - flat(loaded[0]), found[name][1])
    return found


@pytest.mark.parametrize("way", ["callable", "graph"])
def test_a_custom_loss_moves_the_weights_where_plain_torch_moves_them(
    deltas: dict[str, tuple[Tensor, float]], way: str
) -> None:
    ours, theirs = deltas[way][0], deltas["plain"][0]
    assert float(theirs.norm()) > 0.1
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_the_server_evaluates_a_traced_loss_as_the_client_does(deltas: dict[str, tuple[Tensor, float]]) -> None:
    client, server = deltas["callable"], deltas["graph"]
    assert float((server[0] - client[0]).norm() / client[0].norm()) < 1e-6
    assert server[1] == pytest.approx(client[1], rel=1e-6)
