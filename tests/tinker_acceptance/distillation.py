"""``distillation.train_off_policy``: a fresh student learns a teacher's twenty likeliest tokens at every position."""

from pathlib import Path

from tests.tinker_acceptance.chats import common_config, conversations
from tests.tinker_acceptance.outcome import Outcome, falls
from tests.tinker_acceptance.place import RENDERER, Place, curve
from tests.tinker_acceptance.sessions import dataset, program, step

MODULE = "tests.tinker_acceptance.drive tinker_cookbook.distillation.train_off_policy"
BATCH, TARGETS = 8, 20


def run(place: Place, *, steps: int = 8, below: float = 0.7) -> list[Outcome]:
    chats = conversations(place.work / "distilled.jsonl", BATCH * steps)
    part = "dataset_configs.0.dataset_builder"
    options = {
        "model_name": place.model,
        "recipe_name": "acceptance_distillation",
        "renderer_name": RENDERER,
        "lora_rank": place.rank,
        "batch_size": BATCH,
        part: "tinker_cookbook.supervised.data:FromConversationFileBuilder",
        f"{part}.file_path": chats,
        **common_config(place, part, BATCH),
        "dataset_configs.0.teacher_config.base_model": place.model,
        "dataset_configs.0.teacher_config.load_checkpoint_path": _teacher(place, chats, steps),
        "n_teacher_targets": TARGETS,
        "learning_rate": 1e-3,
        "eval_every": 0,
        "save_every": 0,
    }
    log = place.finish("distillation", MODULE, options)
    losses, targets = curve(log, "train/loss:sum"), curve(log, "train/loss_tokens:sum")
    per_token = [loss * TARGETS / count for loss, count in zip(losses, targets, strict=True)]
    return [falls("cross-entropy with the teacher", per_token, below=below)]


def _teacher(place: Place, chats: Path, steps: int) -> str:
    """Fine-tune on the same chats and return the path of what came of it."""
    batches = dataset(place, chats, batch_size=BATCH)
    with program(place) as service:
        # Under an adapter on the unembedding a trainer ranks the tokens, which takes longer than the engine.
        training = service.create_lora_training_client(str(place.model), rank=place.rank, train_unembed=False).result()
        for number in range(steps):
            step(training, batches.get_batch(number), 1e-3)
        return training.save_weights_for_sampler("teacher").result().path
