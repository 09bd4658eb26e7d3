"""The ``tinker`` command line against the real gateway and trainer: what it lists, changes, downloads and deletes.

Nothing here is sampled, so a scripted engine stands beside the trainer.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import tinker
import torch
import transformers
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli

from tests.stack import EngineEndpoint, Stack, running_stack
from tests.tiny_model import FULL_VOCABULARY
from tests.wire.tinker_clients import SDK_WARNINGS, sdk_is_collected

__all__ = ["sdk_is_collected"]

pytestmark = [
    *SDK_WARNINGS,
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

LESSON = [5000, 6000, 7000, 8000, 9000]
Cli = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def stack(
    scripted_engine: EngineEndpoint, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    endpoint = replace(scripted_engine, model_path=tiny_model, dtype="float32", vocab_size=FULL_VOCABULARY)
    with running_stack(endpoint, tmp_path_factory.mktemp("tinker-cli")) as running:
        yield running


@pytest.fixture
def cli(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line; it returns what a command printed as JSON."""
    monkeypatch.setenv("TINKER_BASE_URL", f"{stack.url}/tinker")
    monkeypatch.setenv("TINKER_API_KEY", stack.key)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")

    def invoke(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(main_cli, ["-f", "json", *words])
        assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
        return json.loads(done.stdout[done.stdout.index("{") :]) if "{" in done.stdout else {}

    return invoke


def trained(stack: Stack) -> tuple[str, np.ndarray]:
    """Train the SDK's default layers, save once of each kind, and end; return the model and its scores of LESSON."""
    service = tinker.ServiceClient(base_url=f"{stack.url}/tinker", api_key=stack.key)
    training = service.create_lora_training_client(stack.base_model, rank=8, seed=3).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(LESSON[:-1]),
        loss_fn_inputs={"target_tokens": LESSON[1:], "weights": [1.0] * (len(LESSON) - 1)},
    )
    for _ in range(2):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
    for save in (training.save_state, training.save_weights_for_sampler, training.save_weights_external):
        save("final").result()
    output = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]
    service.close("success").result()
    return training.model_id, output["logprobs"].to_numpy()


def scored(base: Path, adapter: Path) -> np.ndarray:
    """Return the scores of LESSON by transformers and PEFT alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([LESSON[:-1]])).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(LESSON[1:])[:, None])[:, 0].numpy()


def test_the_command_line_lists_describes_keeps_downloads_and_deletes(
    stack: Stack, cli: Cli, tiny_model: Path, tmp_path: Path
) -> None:
    model, expected = trained(stack)
    state, sampler, external = (
        f"tinker://{model}/{space}/final" for space in ("weights", "sampler_weights", "external_weights")
    )

    assert [run["training_run_id"] for run in cli("run", "list")["runs"]] == [model]
    assert cli("run", "info", model)["lora_rank"] == 8
    assert [each["model_name"] for each in cli("model", "list")["models"]] == [stack.base_model]
    paths = [each["tinker_path"] for each in cli("checkpoint", "list")["checkpoints"]]
    assert sorted(paths) == sorted([state, sampler, external])

    cli("checkpoint", "publish", sampler)
    assert cli("checkpoint", "info", sampler)["public"] is True
    cli("checkpoint", "unpublish", sampler)
    assert cli("checkpoint", "info", sampler)["public"] is False
    cli("checkpoint", "set-ttl", sampler, "--ttl", "7200")
    kept = datetime.fromisoformat(cli("checkpoint", "info", sampler)["expires_at"]) - datetime.now(UTC)
    assert timedelta(hours=1.9) < kept < timedelta(hours=2.1)
    cli("checkpoint", "set-ttl", sampler, "--remove")
    assert cli("checkpoint", "info", sampler)["expires_at"] is None

    for path in (external, state):  # a state is loaded into a model of its own, and that is exported
        done = cli("checkpoint", "download", path, "--output", str(tmp_path))
        directory = Path(done["destination"])
        files = {file.name: file.stat().st_size for file in directory.iterdir()}
        assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
        assert done["file_size_bytes"] == sum(files.values())
        assert np.abs(scored(tiny_model, directory) - expected).max() < 1e-4

    cli("checkpoint", "delete", "-y", sampler)
    left = [each["tinker_path"] for each in cli("checkpoint", "list", "--run-id", model)["checkpoints"]]
    assert sorted(left) == sorted([state, external])
    # The export that a download leaves for a moment is gone, too.
    assert sorted(each["tinker_path"] for each in cli("checkpoint", "list")["checkpoints"]) == sorted(left)
