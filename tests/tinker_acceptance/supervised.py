"""``supervised.train`` on a file of chats, evaluated on a part kept apart; killed after a checkpoint, and resumed.

The trainer submits a batch ahead and saves afterwards, so a checkpoint called k holds batch k + 1 too, and a resumed
run begins at k again. The straight run that it is compared with therefore takes the same batches in the same order, in
one go: without a save, a kill or a load.
"""

from pathlib import Path

import httpx
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.utils.lr_scheduling import compute_schedule_lr_multiplier

from tests.tinker_acceptance.chats import common_config, conversations
from tests.tinker_acceptance.outcome import Outcome, falls, same
from tests.tinker_acceptance.place import RENDERER, Options, Place, curve, lines
from tests.tinker_acceptance.sessions import dataset, program, step

MODULE = "tests.tinker_acceptance.drive tinker_cookbook.supervised.train"
BATCH, HELD_OUT = 8, 16
LEARNING_RATE = 1e-3
SUBMITTED_AHEAD = 1


def run(place: Place, *, batches: int = 16, save_every: int = 5, below: float = 0.6) -> list[Outcome]:
    chats = conversations(place.work / "chats.jsonl", BATCH * batches + HELD_OUT)
    options: Options = {
        "model_name": place.model,
        "recipe_name": "acceptance_supervised",
        "renderer_name": RENDERER,
        "dataset_builder": "tinker_cookbook.supervised.data:FromConversationFileBuilder",
        "dataset_builder.file_path": chats,
        "dataset_builder.test_size": HELD_OUT,
        **common_config(place, "dataset_builder", BATCH),
        "learning_rate": LEARNING_RATE,
        "lora_rank": place.rank,
        "save_every": save_every,
        "eval_every": batches - 1,
        "submit_ahead": SUBMITTED_AHEAD,
    }
    place.kill_once("supervised", MODULE, options, _has_a_checkpoint)
    saved = lines(place.log_path("supervised") / "checkpoints.jsonl")[-1]
    log = place.finish("supervised", MODULE, options)
    nll = curve(log, "train_mean_nll")
    again = int(str(saved["batch"]))
    order = [*range(again + SUBMITTED_AHEAD + 1), *range(again, batches)]
    return [
        falls("test/nll", curve(log, "test/nll"), below=below),
        same("final nll, straight and resumed", straight(place, chats, str(saved["state_path"]), order), nll[-1]),
    ]


def straight(place: Place, chats: Path, state_path: str, order: list[int]) -> float:
    """Train on the batches in ``order`` from the same first adapter; return the last one's mean loss per token."""
    batches = dataset(place, chats, batch_size=BATCH, test_size=HELD_OUT)
    last = float("nan")
    with program(place) as service:
        seed = _seed_of(place, state_path)
        training = service.create_lora_training_client(str(place.model), rank=place.rank, seed=seed).result()
        for number in order:
            data = batches.get_batch(number)
            left = compute_schedule_lr_multiplier("linear", step=number, total_steps=len(batches))
            outputs = step(training, data, LEARNING_RATE * left).loss_fn_outputs
            weights = [datum.loss_fn_inputs["weights"] for datum in data]
            last = compute_mean_nll([output["logprobs"] for output in outputs], weights)
    return last


def _seed_of(place: Place, state_path: str) -> int:
    """The recipe gives no seed; the server says which one it drew for the model that saved ``state_path``."""
    model = state_path.removeprefix("tinker://").split("/")[0]
    headers = {"Authorization": f"Bearer {place.key}"}
    answer = httpx.get(f"{place.url}/training/v1/sessions/{model}", headers=headers, timeout=60)
    return int(answer.raise_for_status().json()["lora"]["seed"])


def _has_a_checkpoint(log: Path) -> bool:
    return bool(lines(log / "checkpoints.jsonl"))
