"""The Tinker SDK's REST client: runs, checkpoints, their upkeep, and what was consumed."""

import io
import tarfile
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from gateway.core.scripted import SCRIPTED_NAME
from tests.wire.gateways import Gateway
from tests.wire.tinker_clients import SDK_WARNINGS, datum, sdk_is_collected, tinker_service, training_client

__all__ = ["sdk_is_collected"]

pytestmark = SDK_WARNINGS

METADATA = {"renderer": "role_colon"}


@pytest.fixture(scope="module")
def model(gateway: Gateway) -> str:
    """A model with a state, an adapter and an external adapter, of a program that has ended."""
    with tinker_service(gateway, user_metadata={"who": "tests"}, display_name="lister") as service:
        training = training_client(service, user_metadata=METADATA)
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(types.AdamParams())
        training.save_state("state", ttl_seconds=7200, user_metadata={"step": "1"}).result()
        training.save_weights_for_sampler("adapter").result()
        training.save_weights_external("adapter").result()
        training.save_weights_and_get_sampling_client().result()
        return training.model_id


@pytest.fixture(scope="module")
def rest(gateway: Gateway) -> tinker.RestClient:
    return tinker.RestClient(base_url=f"{gateway.url}/tinker", api_key=gateway.keys.owner)


def test_a_run_is_listed_with_its_newest_checkpoints(rest: tinker.RestClient, model: str) -> None:
    run = rest.get_training_run(model).result()
    assert run.training_run_id == model
    assert run.user_metadata == METADATA
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == f"tinker://{model}/weights/state"
    assert run.last_sampler_checkpoint is not None
    listed = rest.list_training_runs(limit=1000, offset=0).result()
    assert model in [one.training_run_id for one in listed.training_runs]
    assert listed.cursor.total_count == len(listed.training_runs)
    second = rest.list_training_runs(limit=1, offset=1).result()
    assert [one.training_run_id for one in second.training_runs] == [
        one.training_run_id for one in listed.training_runs[1:2]
    ]
    assert rest.get_training_run_by_tinker_path(f"tinker://{model}/weights/state").result() == run


def test_checkpoints_are_listed_by_kind_and_unnamed_ones_are_not(rest: tinker.RestClient, model: str) -> None:
    listed = rest.list_checkpoints(model).result().checkpoints
    assert {(c.checkpoint_type, c.checkpoint_id) for c in listed} == {
        ("training", "weights/state"),
        ("sampler", "sampler_weights/adapter"),
        ("external", "external_weights/adapter"),
    }
    state = next(c for c in listed if c.checkpoint_type == "training")
    assert state.user_metadata == {"step": "1"}
    assert state.expires_at is not None
    assert timedelta(hours=1.9) < state.expires_at - state.time < timedelta(hours=2.1)
    everything = rest.list_user_checkpoints(limit=100).result()
    assert everything.cursor is not None
    assert everything.cursor.total_count >= 3


def test_a_checkpoint_says_what_it_was_trained_on(rest: tinker.RestClient, model: str) -> None:
    info = rest.get_weights_info_by_tinker_path(f"tinker://{model}/weights/state").result()
    assert (info.base_model, info.lora_rank, info.is_lora) == ("scripted", 8, True)
    assert (info.train_unembed, info.train_mlp, info.train_attn) == (True, True, True)


def test_a_session_lists_what_it_opened(rest: tinker.RestClient, model: str) -> None:
    session = rest.get_session(model.split(":")[0]).result()
    assert session.training_run_ids == [model]
    assert len(session.sampler_ids) == 1
    assert session.user_metadata == {"who": "tests"}
    assert model.split(":")[0] in rest.list_sessions(limit=10).result().sessions
    sampler = rest.get_sampler(session.sampler_ids[0]).result()
    assert sampler.base_model == "scripted"


def test_a_checkpoint_is_flagged_extended_and_deleted(gateway: Gateway, rest: tinker.RestClient) -> None:
    with tinker_service(gateway) as service:
        training = training_client(service)
        path = training.save_state("short", ttl_seconds=3600).result().path

        def read() -> Any:
            return next(c for c in rest.list_checkpoints(training.model_id).result().checkpoints)

        rest.publish_checkpoint_from_tinker_path(path).result()
        assert read().public is True
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        assert read().public is False
        rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
        assert read().expires_at is None
        training.save_state("short", overwrite=True).result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert rest.list_checkpoints(training.model_id).result().checkpoints == []
        with pytest.raises(tinker.NotFoundError):
            training.load_state(path).result()
        step = training.forward_backward([datum()], "cross_entropy")
        assert step.result().metrics["loss:sum"] > 0


def test_a_name_is_taken_once_unless_it_is_to_be_overwritten(gateway: Gateway) -> None:
    with tinker_service(gateway) as service:
        training = training_client(service)
        first = training.save_state("twice").result().path
        with pytest.raises(tinker.BadRequestError, match="twice"):
            training.save_state("twice").result()
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(types.AdamParams())
        assert training.save_state("twice", overwrite=True).result().path == first
        training.load_state_with_optimizer(first).result()
        with pytest.raises(tinker.BadRequestError, match="name"):
            training.save_state("../up").result()


def test_an_external_adapter_is_fetched_by_its_links_alone(
    rest: tinker.RestClient, gateway: Gateway, model: str
) -> None:
    links = rest.get_external_weights_urls(f"tinker://{model}/external_weights/adapter").result()
    assert set(links.urls) == {SCRIPTED_NAME}  # what the scripted trainer's adapters are made of
    assert links.expires > datetime.now(UTC)
    url = links.urls[SCRIPTED_NAME]
    assert len(httpx.get(url).json()["fingerprint"]) == 64
    for changed in (
        url.replace("signature=", "signature=0"),
        url.replace(SCRIPTED_NAME, "archive.tar"),
        url.replace("expires=", "expires=9"),
    ):
        assert httpx.get(changed).status_code == 404


def test_older_clients_are_led_to_the_archive(gateway: Gateway, model: str) -> None:
    answer = httpx.get(
        f"{gateway.url}/tinker/api/v1/training_runs/{model}/checkpoints/external_weights/adapter/archive",
        headers={"X-API-Key": gateway.keys.owner},
    )
    assert answer.status_code == 302
    assert parsedate_to_datetime(answer.headers["Expires"]) > datetime.now(UTC)
    with tarfile.open(fileobj=io.BytesIO(httpx.get(answer.headers["Location"]).content)) as archive:
        assert archive.getnames() == [SCRIPTED_NAME]


def test_usage_is_what_the_ledger_says(gateway: Gateway, rest: tinker.RestClient, model: str) -> None:
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    usage = rest.get_billing_usage(
        starting_on=start - timedelta(hours=1), ending_before=start + timedelta(hours=1)
    ).result()
    trained = [e for e in usage.data if e.session_id == model and e.event_info.type == "training"]
    assert [event.event_info.token_count for event in trained] == [4]
    assert trained[0].estimated_cost_usd is not None
    assert usage.sessions[model].user_metadata == METADATA


def test_a_checkpoint_is_copied_into_a_run_that_cannot_be_trained_on(
    gateway: Gateway, rest: tinker.RestClient, model: str
) -> None:
    project = gateway.in_unit(lambda unit: unit.keys.ensure_project("mine"))

    def loss(client: tinker.TrainingClient) -> float:
        return client.forward([datum()], "cross_entropy").result().metrics["loss:sum"]

    for space, name in (("weights", "state"), ("external_weights", "adapter")):
        path = f"tinker://{model}/{space}/{name}"
        copy = rest.copy_weights(path, project, ttl_seconds=3600).result()
        run = copy.split("/")[2]
        assert copy == f"tinker://{run}/{space}/{name}"
        assert run != model
        kept = rest.list_checkpoints(run).result().checkpoints
        assert [each.tinker_path for each in kept] == [copy]
        assert kept[0].expires_at is not None
        with gateway.client() as native:
            session = native.get(f"/sessions/{run}").json()
        assert session["status"] == "stopped"
    with tinker_service(gateway) as service:
        copy = rest.copy_weights(f"tinker://{model}/weights/state", project).result()
        both = [
            service.create_training_client_from_state_with_optimizer(each).result()
            for each in (f"tinker://{model}/weights/state", copy)
        ]
        assert loss(both[0]) == loss(both[1])
    with pytest.raises(tinker.PermissionDeniedError, match="another project"):
        rest.copy_weights(copy, "other").result()
    with pytest.raises(tinker.NotFoundError):
        rest.copy_weights(f"tinker://{model}/weights/nothing", project).result()


def test_stored_bytes_are_counted(rest: tinker.RestClient, model: str) -> None:
    stored = rest.get_current_checkpoint_storage_usage().result().data[0]
    assert stored.checkpoint_count >= 4
    assert 0 < stored.size_bytes == pytest.approx(stored.size_gigabytes * 1e9)


def test_what_has_no_answer_here_is_refused_for_good(rest: tinker.RestClient, model: str) -> None:
    session = model.split(":")[0]
    refused = [
        lambda: rest.search_sessions(types.SessionSearchRequest()).result(),
        lambda: rest.get_audit_log().result(),
        lambda: rest.assign_session_project(session, "other").result(),
        lambda: rest.export_session_trace(session).result(),
    ]
    for call in refused:
        with pytest.raises((tinker.TinkerError, RuntimeError), match=r"not offered|keeps no traces|project|stays"):
            call()
