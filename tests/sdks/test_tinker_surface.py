"""The page for Tinker users tells of every method and route of the installed SDK, and what it tells is tested."""

import re
from pathlib import Path

from starlette.routing import Match, Route

from gateway.wire.tinker.app import create_tinker_app
from gateway.wire.tinker.schemas import ClientConfig
from tests.sdks.tinker_checklist import CHECKLIST, FIRST
from tests.sdks.tinker_surface import NotApplicable, Refused, Verdict, Works, methods, route_table, routes, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients" / "tinker.md"

CONSOLE = NotApplicable("a text that the SDK builds, of a console that is not this server's")
NO_ANSWER = "test_what_has_no_answer_here_is_refused_for_good"
COPY = Works("test_a_checkpoint_is_copied_into_a_run_that_cannot_be_trained_on")
NO_AUDIT = Refused("what happened to a version is in its group's history", NO_ANSWER)
STEP = Works("test_a_step_is_pipelined_and_its_outputs_are_in_order")
STATE = Works("test_a_state_is_loaded_into_the_same_and_into_a_new_model")
UPKEEP = Works("test_a_checkpoint_is_flagged_extended_and_deleted")
LISTED = Works("test_checkpoints_are_listed_by_kind_and_unnamed_ones_are_not")
RUN = Works("test_a_run_is_listed_with_its_newest_checkpoints")
USAGE = Works("test_usage_is_what_the_ledger_says")
SAMPLER = Works("test_a_saved_sampler_samples_and_scores")
OPENED = Works("test_a_session_lists_what_it_opened")

VERDICTS: dict[str, Verdict] = {
    "ServiceClient.close": Works("test_a_finished_program_is_told_to_stop"),
    "ServiceClient.copy_weights": COPY,
    "ServiceClient.create_custom_loss": Works("test_the_server_evaluates_a_traced_loss_as_the_client_does"),
    "ServiceClient.create_lora_training_client": Works("test_a_model_is_described_as_it_was_asked_for"),
    "ServiceClient.create_rest_client": RUN,
    "ServiceClient.create_sampling_client": Works("test_a_named_checkpoint_is_sampled_by_its_path"),
    "ServiceClient.create_training_client_from_state": STATE,
    "ServiceClient.create_training_client_from_state_with_optimizer": STATE,
    "ServiceClient.get_console_url": NotApplicable(
        "a text that the SDK builds, of a console that is not this server's"
    ),
    "ServiceClient.get_server_capabilities": Works("test_the_catalogue_is_what_the_server_can_do"),
    "TrainingClient.create_sampling_client": Works("test_a_named_checkpoint_is_sampled_by_its_path"),
    "TrainingClient.forward": STEP,
    "TrainingClient.forward_backward": STEP,
    "TrainingClient.forward_backward_custom": Works(
        "test_a_custom_loss_moves_the_weights_where_plain_torch_moves_them"
    ),
    "TrainingClient.get_console_url": NotApplicable(
        "a text that the SDK builds, of a console that is not this server's"
    ),
    "TrainingClient.get_info": Works("test_a_model_is_described_as_it_was_asked_for"),
    "TrainingClient.get_tokenizer": Works("test_the_default_adapter_trains_samples_and_agrees_with_its_sampler"),
    "TrainingClient.load_state": STATE,
    "TrainingClient.load_state_with_optimizer": STATE,
    "TrainingClient.optim_step": STEP,
    "TrainingClient.save_state": STATE,
    "TrainingClient.save_weights_and_get_sampling_client": SAMPLER,
    "TrainingClient.save_weights_external": LISTED,
    "TrainingClient.save_weights_for_sampler": Works("test_a_named_checkpoint_is_sampled_by_its_path"),
    "SamplingClient.compute_logprobs": SAMPLER,
    "SamplingClient.create": SAMPLER,
    "SamplingClient.from_sampler_handle": Works("test_a_copy_of_a_sampler_has_a_number_of_its_own"),
    "SamplingClient.get_base_model": Works("test_a_base_model_is_sampled_without_training"),
    "SamplingClient.get_sampler_handle": Works("test_a_copy_of_a_sampler_has_a_number_of_its_own"),
    "SamplingClient.get_tokenizer": Works("test_the_default_adapter_trains_samples_and_agrees_with_its_sampler"),
    "SamplingClient.on_queue_state_change": NotApplicable("the SDK's own log"),
    "SamplingClient.sample": SAMPLER,
    "RestClient.assign_session_project": Refused("a session stays in the project of its key", NO_ANSWER),
    "RestClient.copy_weights": COPY,
    "RestClient.delete_checkpoint": UPKEEP,
    "RestClient.delete_checkpoint_from_tinker_path": UPKEEP,
    "RestClient.export_session_trace": Refused("this server keeps no traces", NO_ANSWER),
    "RestClient.get_audit_log": NO_AUDIT,
    "RestClient.get_billing_usage": USAGE,
    "RestClient.get_current_checkpoint_storage_usage": Works("test_stored_bytes_are_counted"),
    "RestClient.get_external_weights_urls": Works("test_an_external_adapter_is_fetched_by_its_links_alone"),
    "RestClient.get_sampler": OPENED,
    "RestClient.get_server_capabilities": Works("test_the_catalogue_is_what_the_server_can_do"),
    "RestClient.get_session": OPENED,
    "RestClient.get_training_run": RUN,
    "RestClient.get_training_run_by_tinker_path": RUN,
    "RestClient.get_weights_info_by_tinker_path": Works("test_a_checkpoint_says_what_it_was_trained_on"),
    "RestClient.list_checkpoints": LISTED,
    "RestClient.list_sessions": OPENED,
    "RestClient.list_training_runs": RUN,
    "RestClient.list_user_checkpoints": LISTED,
    "RestClient.publish_checkpoint_from_tinker_path": Works("test_a_checkpoint_is_flagged_extended_and_deleted"),
    "RestClient.search_sessions": Refused("list sessions instead", NO_ANSWER),
    "RestClient.set_checkpoint_ttl_from_tinker_path": UPKEEP,
    "RestClient.unpublish_checkpoint_from_tinker_path": UPKEEP,
    "RestClient.whoami": NotApplicable("answers from a token that Loopline does not use"),
    "AdminClient.get_audit_log": NO_AUDIT,
    "AdminClient.get_billing_usage": USAGE,
    "AdminClient.get_current_checkpoint_storage_usage": Works("test_stored_bytes_are_counted"),
}


EXTERNAL = "test_an_external_adapter_is_fetched_by_its_links_alone"
SERVED_ROUTES = {
    "/api/v1/asample": "test_a_sample_is_computed_once_and_can_be_fetched_again",
    "/api/v1/billing/usage/checkpoints/current": "test_stored_bytes_are_counted",
    "/api/v1/billing/usage/events": "test_usage_is_what_the_ledger_says",
    "/api/v1/cancel_future": "test_a_sample_that_is_given_up_after_its_answer_keeps_it",
    "/api/v1/checkpoints": "test_checkpoints_are_listed_by_kind_and_unnamed_ones_are_not",
    "/api/v1/client/config": FIRST,
    "/api/v1/client/dynamic_config": FIRST,
    "/api/v1/copy_weights": "test_a_checkpoint_is_copied_into_a_run_that_cannot_be_trained_on",
    "/api/v1/create_custom_loss": "test_a_number_names_one_loss_for_good",
    "/api/v1/create_model": "test_a_model_is_described_as_it_was_asked_for",
    "/api/v1/create_sampling_session": "test_a_named_checkpoint_is_sampled_by_its_path",
    "/api/v1/create_session": FIRST,
    "/api/v1/forward_backward": "test_a_step_is_pipelined_and_its_outputs_are_in_order",
    "/api/v1/get_info": "test_a_model_is_described_as_it_was_asked_for",
    "/api/v1/get_server_capabilities": "test_the_catalogue_is_what_the_server_can_do",
    "/api/v1/healthz": FIRST,
    "/api/v1/join_sampling_session": "test_a_copy_of_a_sampler_has_a_number_of_its_own",
    "/api/v1/load_weights": "test_a_state_is_loaded_into_the_same_and_into_a_new_model",
    "/api/v1/optim_step": "test_the_six_fields_of_a_step_arrive_and_have_the_sdks_defaults",
    "/api/v1/retrieve_future": "test_a_sample_is_computed_once_and_can_be_fetched_again",
    "/api/v1/samplers/{}": "test_a_session_lists_what_it_opened",
    "/api/v1/save_weights": "test_a_state_is_loaded_into_the_same_and_into_a_new_model",
    "/api/v1/save_weights_external": EXTERNAL,
    "/api/v1/save_weights_for_sampler": "test_a_named_checkpoint_is_sampled_by_its_path",
    "/api/v1/session_heartbeat": FIRST,
    "/api/v1/sessions": "test_a_session_lists_what_it_opened",
    "/api/v1/sessions/{}": "test_a_session_lists_what_it_opened",
    "/api/v1/sessions/{}/finish": "test_a_finished_program_is_told_to_stop",
    "/api/v1/telemetry": FIRST,
    "/api/v1/training_runs": "test_a_run_is_listed_with_its_newest_checkpoints",
    "/api/v1/training_runs/{}": "test_a_run_is_listed_with_its_newest_checkpoints",
    "/api/v1/training_runs/{}/checkpoints": "test_checkpoints_are_listed_by_kind_and_unnamed_ones_are_not",
    "/api/v1/training_runs/{}/checkpoints/{}": "test_a_checkpoint_is_flagged_extended_and_deleted",
    "/api/v1/training_runs/{}/checkpoints/{}/external_weights_urls": EXTERNAL,
    "/api/v1/training_runs/{}/checkpoints/{}/publish": "test_a_checkpoint_is_flagged_extended_and_deleted",
    "/api/v1/training_runs/{}/checkpoints/{}/ttl": "test_a_checkpoint_is_flagged_extended_and_deleted",
    "/api/v1/weights_info": "test_a_checkpoint_says_what_it_was_trained_on",
}
REFUSED_ROUTES = {
    "/api/v1/audit": "what happened to a version is in its group's history",
    "/api/v1/sessions/search": "list sessions instead",
    "/api/v1/sessions/{}/project": "a session stays in the project of its key",
    "/api/v1/sessions/{}/trace_export": "this server keeps no traces",
}
UNASKED_ROUTES = {
    "/api/v1/auth/apikey/me": "logs in to and out of the hosted service",
    "/api/v1/auth/token": "`pjwt_auth_enabled` is off: the key itself is sent",
    "/api/v1/retrieve_futures": "`sample_use_retrieve_futures` is off: results are fetched one by one",
}


def test_every_method_has_a_verdict_and_its_test_exists() -> None:
    assert set(VERDICTS) == set(methods())
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_tinker*.py"))
    tests = set(re.findall(r"^def (test_\w+)\(", sources, re.MULTILINE))
    named = {verdict.test for verdict in VERDICTS.values() if not isinstance(verdict, NotApplicable)}
    assert (named | set(SERVED_ROUTES.values())) - tests == set()


def test_every_item_of_the_checklist_is_shown_by_tests_that_exist() -> None:
    assert len(CHECKLIST) == 30
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^(?:async )?def (test_\w+)\(", sources, re.MULTILINE))
    assert {test for shown in CHECKLIST.values() for test in shown} - tests == set()


def test_the_page_tells_the_verdicts() -> None:
    text = PAGE.read_text().split("<!-- methods -->")[1].split("<!-- /methods -->")[0]
    assert text.strip() == table(VERDICTS)


def served(path: str) -> bool:
    """Whether any method of ``path`` reaches a route; ids are filled in."""
    filled = path.replace("checkpoints/{}", "checkpoints/external_weights/x").replace("{}", "x")
    scope = {"type": "http", "method": "GET", "path": filled, "root_path": ""}
    return any(
        route.matches(scope)[0] is not Match.NONE for route in create_tinker_app().routes if isinstance(route, Route)
    )


def test_every_route_of_the_sdk_is_served_or_never_asked_for() -> None:
    found = routes()
    assert len(found) > 40
    assert found == SERVED_ROUTES.keys() | REFUSED_ROUTES.keys() | UNASKED_ROUTES.keys()
    assert {path for path in found if not served(path)} == set(UNASKED_ROUTES)


def test_the_flags_that_would_ask_for_missing_routes_are_off() -> None:
    told = ClientConfig(fwdbwd_max_chunk_len=1).model_dump()
    flags = ("pjwt_auth_enabled", "sample_use_retrieve_futures")
    assert [told.get(flag, False) for flag in flags] == [False] * 2


def test_the_page_tells_the_routes() -> None:
    text = PAGE.read_text().split("<!-- routes -->")[1].split("<!-- /routes -->")[0]
    assert text.strip() == route_table(SERVED_ROUTES, REFUSED_ROUTES, UNASKED_ROUTES)
