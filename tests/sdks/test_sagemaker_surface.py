"""The page for SageMaker users tells of every method of the installed SDK, and what it tells is tested."""

import re
from collections.abc import Iterator
from pathlib import Path

from sagemaker.train.training_session import SamplingClient, ServiceClient, TrainingClient

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients" / "sagemaker.md"
CLIENTS = (ServiceClient, TrainingClient, SamplingClient)

STEP = "test_a_step_is_pipelined_and_its_outputs_are_in_order"
STATE = "test_a_state_is_resumed_in_a_session_that_asked_for_another_rank"
PACKAGES = "test_packages_are_listed_by_kind_described_and_deleted"
SESSIONS = "test_sessions_are_listed_stopped_twice_and_deleted"
SAMPLER = "test_a_saved_sampler_samples_and_scores"
BASE = "test_the_base_model_answers_where_nothing_was_trained_and_not_in_place_of_what_was"
TOUR = "test_the_client_tour"

TESTS = {
    "ServiceClient.create_lora_training_client": STEP,
    "ServiceClient.create_sampling_client": BASE,
    "ServiceClient.create_training_client_from_state": STATE,
    "ServiceClient.create_training_client_from_state_with_optimizer": STATE,
    "ServiceClient.delete_model_package": PACKAGES,
    "ServiceClient.delete_session": SESSIONS,
    "ServiceClient.get_latest_model_package": PACKAGES,
    "ServiceClient.list_base_models": "test_the_catalogue_is_listed_and_a_short_name_is_enough",
    "ServiceClient.list_model_packages": PACKAGES,
    "ServiceClient.list_sessions": SESSIONS,
    "ServiceClient.stop_session": SESSIONS,
    "TrainingClient.create_sampling_client": BASE,
    "TrainingClient.current_sequence_number": "test_a_large_batch_comes_in_three_parts_and_steps_once",
    "TrainingClient.delete": TOUR,
    "TrainingClient.forward": STEP,
    "TrainingClient.forward_backward": STEP,
    "TrainingClient.get_latest_model_package": PACKAGES,
    "TrainingClient.get_tokenizer": TOUR,
    "TrainingClient.list_model_packages": TOUR,
    "TrainingClient.load_state": TOUR,
    "TrainingClient.load_state_with_optimizer": STATE,
    "TrainingClient.optim_step": STEP,
    "TrainingClient.save_state": STATE,
    "TrainingClient.save_weights_and_get_sampling_client": SAMPLER,
    "TrainingClient.save_weights_for_sampler": PACKAGES,
    "TrainingClient.stop": SESSIONS,
    "SamplingClient.compute_logprobs": SAMPLER,
    "SamplingClient.get_tokenizer": TOUR,
    "SamplingClient.sample": SAMPLER,
    "SamplingClient.stop": TOUR,
}


def methods() -> Iterator[str]:
    """Yield every public method; twins that only wait differently count once."""
    for client in CLIENTS:
        for name in sorted(vars(client)):
            value = vars(client)[name]
            if (
                not name.startswith("_")
                and not name.endswith("_async")
                and (callable(value) or isinstance(value, property))
            ):
                yield f"{client.__name__}.{name}"


def table() -> str:
    return "\n".join(
        ["| method | here | what shows it |", "|---|---|---|"]
        + [f"| `{name}` | works | `{TESTS[name]}` |" for name in methods()]
    )


def test_every_method_has_a_test_that_exists() -> None:
    assert set(TESTS) == set(methods())
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_sagemaker*.py"))
    assert set(TESTS.values()) - set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE)) == set()


def test_the_page_tells_them() -> None:
    text = PAGE.read_text().split("<!-- methods -->")[1].split("<!-- /methods -->")[0]
    assert text.strip() == table()
