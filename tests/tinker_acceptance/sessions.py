"""Plain SDK programs beside the recipes': what a recipe is compared with, or starts from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tinker
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig, SupervisedDataset

from tests.tinker_acceptance.chats import MAX_LENGTH
from tests.tinker_acceptance.place import RENDERER, Place


@contextmanager
def program(place: Place) -> Iterator[tinker.ServiceClient]:
    """A program of the SDK, which says so when it ends."""
    service = tinker.ServiceClient(base_url=place.base_url, api_key=place.key)
    try:
        yield service
    finally:
        service.close("success").result()


def dataset(place: Place, chats: Path, *, batch_size: int, test_size: int = 0) -> SupervisedDataset:
    """Return the batches that the cookbook makes of a file of chats in its first epoch."""
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=str(place.model),
        renderer_name=RENDERER,
        max_length=MAX_LENGTH,
        batch_size=batch_size,
    )
    batches, _ = FromConversationFileBuilder(common_config=common, file_path=str(chats), test_size=test_size)()
    batches.set_epoch(seed=0)
    return batches


def step(
    training: tinker.TrainingClient, data: Sequence[tinker.Datum], learning_rate: float
) -> tinker.ForwardBackwardOutput:
    """One step of fine-tuning with the cookbook's Adam parameters; return what was computed before it."""
    batch = training.forward_backward(list(data), "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)).result()
    return batch.result()
