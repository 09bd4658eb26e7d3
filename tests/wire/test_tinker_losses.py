"""Custom losses of the Tinker dialect: kept once for each number, found by their project alone, refused by node."""

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from gateway.core.scripted import BASE_FINGERPRINT, scripted_logprob
from gateway.wire.tinker import wire_pb2 as pb
from gateway.wire.tinker.loss_schemas import MAX_LOSSES
from tests.trainer.traced import asked
from tests.wire.gateways import Gateway
from tests.wire.test_tinker_refusals import batch, connect, new_client, new_model, ok, post_batch, raw, result
from tests.wire.tinker_clients import SDK_WARNINGS, model_input, sdk_is_collected, tinker_service, training_client

__all__ = ["raw", "sdk_is_collected"]

pytestmark = SDK_WARNINGS


def weighted(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weighted:sum": loss}


RANKS = {"logprobs": 1, "weights": 1}


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    pytest.importorskip("torch")
    return asked(weighted, RANKS)


@pytest.fixture(scope="module")
def service(gateway: Gateway) -> Iterator[tinker.ServiceClient]:
    with tinker_service(gateway) as service:
        yield service


def custom_batch(model: str, seq: int, loss_id: str) -> bytes:
    message = pb.ForwardBackwardRequest.FromString(batch(model, seq, loss_fn="custom"))
    message.loss_fn_config_v2["loss_id"].text = loss_id
    return message.SerializeToString()


def test_a_traced_loss_is_kept_by_the_server_and_named_in_one_request(service: tinker.ServiceClient) -> None:
    handle = service.create_custom_loss(weighted, RANKS).result()
    assert handle.loss_id == f"{handle.session_id}:loss:0"
    training = training_client(service)
    data = types.Datum(
        model_input=model_input([97, 98, 99]),
        loss_fn_inputs={
            "target_tokens": [98, 99, 100],
            "weights": [1.0, 1.0, 1.0],
            "advantages": [1.0, 1.0, 1.0],  # the loss does not read them: they stay out of it, as on the client
        },
    )
    output = training.forward_backward_custom([data], handle).result()
    expected = [scripted_logprob(BASE_FINGERPRINT, token, token + 1) for token in (97, 98, 99)]
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(expected)
    assert "surrogate_loss:sum" not in output.metrics
    assert training.optim_step(types.AdamParams()).result().metrics["learning_rate:mean"] == pytest.approx(1e-4)


def test_a_number_names_one_loss_for_good(raw: httpx.Client, body: dict[str, Any]) -> None:
    body = {**body, "session_id": new_client(raw)}
    first = ok(raw.post("/create_custom_loss", json=body))
    assert ok(raw.post("/create_custom_loss", json=body)) == first
    told = {"loss_id": f"{body['session_id']}:loss:0", "type": "create_custom_loss"}
    assert [result(raw, first).json() for _ in range(2)] == [told, told]
    other = raw.post("/create_custom_loss", json={**body, "name": "other"})
    assert (other.status_code, other.json()["code"]) == (400, "sequence_reused")
    beyond = raw.post("/create_custom_loss", json={**body, "custom_loss_seq_id": MAX_LOSSES})
    assert (beyond.status_code, beyond.json()["field"]) == (400, "custom_loss_seq_id")
    ok(raw.post(f"/sessions/{body['session_id']}/finish", json={"reason": {"type": "success"}}))
    late = raw.post("/create_custom_loss", json={**body, "custom_loss_seq_id": 1})
    assert (late.status_code, late.json()["code"]) == (400, "client_finished")


def test_a_loss_of_another_project_is_none(gateway: Gateway, raw: httpx.Client, body: dict[str, Any]) -> None:
    loss_id = ok(raw.post("/create_custom_loss", json={**body, "session_id": new_client(raw)}))["request_id"]
    with connect(gateway, gateway.keys.stranger) as stranger:
        for request in (
            stranger.post("/retrieve_future", json={"request_id": loss_id}),
            post_batch(stranger, custom_batch(new_model(stranger), 1, loss_id)),
            stranger.post("/create_custom_loss", json={**body, "session_id": loss_id.partition(":")[0]}),
        ):
            assert request.status_code == 404
    with connect(gateway, gateway.keys.inference_only) as reader:
        assert reader.post("/create_custom_loss", json=body).status_code == 403


@pytest.mark.parametrize("loss_id", ["", "x", "client-0000000000000000000000000a:loss:0"])
def test_a_batch_of_no_loss_is_refused_and_blocks_nobody(raw: httpx.Client, loss_id: str) -> None:
    model = new_model(raw)
    refused = post_batch(raw, custom_batch(model, 1, loss_id))
    assert (refused.status_code, refused.json()["code"]) == (404, "custom_loss_not_found")
    assert result(raw, ok(post_batch(raw, batch(model, 2)))).status_code == 200


def changed(body: dict[str, Any], node: str, **fields: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    found = next(each for each in body["graph"]["nodes"] if each["name"] == node)
    found.update(fields)
    return body


@pytest.mark.parametrize(
    ("node", "fields", "says"),
    [
        ("mul", {"target": "torch.load"}, "not among the operations"),
        ("mul", {"target": "builtins.eval"}, "not among the operations"),
        ("mul", {"op": "get_attr", "target": "weight"}, "get_attr is no call"),
        ("mul", {"op": "call_module", "target": "model"}, "call_module is no call"),
        ("sum_1", {"target": "item"}, "not among the operations"),
        ("sum_1", {"kwargs": {"out": {"ref": "mul"}}}, "takes no option 'out'"),
        ("mul", {"args": [{"ref": "sum_1"}, 2]}, "a loss has no cycles"),
        ("mul", {"args": [{"ref": "logprobs"}, {"float": "-inf"}]}, "-inf is not finite"),
        ("output", {"args": [{"ref": "neg"}]}, "must return (loss, metrics)"),
        ("output", {"args": [{"tuple": [{"ref": "neg"}, {"dict": {"custom/a:sum": 1.0}}]}]}, "must be tensors"),
    ],
)
def test_a_graph_that_is_not_allowed_is_refused_by_node(
    raw: httpx.Client, body: dict[str, Any], node: str, fields: dict[str, Any], says: str
) -> None:
    refused = raw.post("/create_custom_loss", json=changed(body, node, **fields))
    assert (refused.status_code, refused.json()["code"], refused.json()["category"]) == (400, "bad_loss_graph", "user")
    assert refused.json()["details"] == {"node": node}
    assert says in refused.json()["error"]


def test_a_graph_without_its_inputs_or_its_output_is_refused(raw: httpx.Client, body: dict[str, Any]) -> None:
    nodes = body["graph"]["nodes"]
    for left in (nodes[1:], nodes[:-1], [nodes[1], nodes[0], *nodes[2:]], []):
        refused = raw.post("/create_custom_loss", json={**body, "graph": {"format": 1, "nodes": left}})
        assert (refused.status_code, refused.json()["code"]) == (400, "bad_loss_graph")
    newer = raw.post("/create_custom_loss", json={**body, "graph": {"format": 2, "nodes": nodes}})
    assert (newer.status_code, newer.json()["field"]) == (400, "graph.format")


def test_what_a_batch_lacks_is_refused_by_place(raw: httpx.Client, body: dict[str, Any]) -> None:
    model, session = new_model(raw), new_client(raw)
    loss_id = ok(raw.post("/create_custom_loss", json={**body, "session_id": session}))["request_id"]
    message = pb.ForwardBackwardRequest.FromString(custom_batch(model, 1, loss_id))
    del message.data[0].loss_fn_inputs["weights"]
    refused = post_batch(raw, message.SerializeToString())
    assert (refused.status_code, refused.json()["field"]) == (400, "data[0].loss_fn_inputs.weights")
    message = pb.ForwardBackwardRequest.FromString(custom_batch(model, 2, loss_id))
    message.loss_fn_config_v2["beta"].number = 1.0
    refused = post_batch(raw, message.SerializeToString())
    assert (refused.status_code, refused.json()["code"]) == (400, "unknown_setting")
