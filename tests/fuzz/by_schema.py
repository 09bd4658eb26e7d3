"""Cases that Schemathesis makes of the operations' schemas: such as fit them, about things that are there, and such as
do not."""

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import schemathesis
from fastapi import FastAPI
from google.protobuf import json_format
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core import NotSet

from gateway.wire.tinker import wire_pb2 as pb
from tests.fuzz.campaign import HANG_S, ROUND, Outcome, send
from tests.fuzz.documents import documents
from tests.tenancy.operations import Operation, keyed
from tests.tenancy.world import World, build
from tests.wire.gateways import Gateway


def run(gateway: Gateway, app: FastAPI, every: list[Operation], *, count: int, number: int) -> Outcome:
    """Send about ``count`` cases, as many for each operation where its schemas allow them; ``number`` decides which."""
    outcome = Outcome()
    each = max(1, round(count / len(every)))
    until = 0  # how many requests the world still serves
    in_order = sorted(every, key=lambda operation: operation.ends)  # what takes things away comes last
    with httpx.Client(timeout=HANG_S, trust_env=False) as client:
        world: World = {}
        for operation, document in documents(app, in_order):
            if outcome.requests >= until:
                world = build(gateway, gateway.keys.owner, f"schema-{number}-{outcome.requests}")
                until = outcome.requests + ROUND
            act = partial(_send, gateway, client, operation, world, outcome)
            _make(document, each, number, act)
    return outcome


def _make(document: dict[str, Any], count: int, number: int, act: Callable[[Any, random.Random], None]) -> None:
    """Call ``act`` with ``count`` cases: the larger half fits the schemas, the other does not."""
    [found] = schemathesis.openapi.from_dict(document).get_all_operations()
    operation = found.ok()
    misfits = count // 2 if operation.body or operation.query or operation.headers else 0  # every path's texts fit
    for mode, share in ((GenerationMode.POSITIVE, count - misfits), (GenerationMode.NEGATIVE, misfits)):
        if share == 0:
            continue

        @seed(number)
        @settings(
            max_examples=share,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), chance=st.randoms(use_true_random=False))
        def each(case: Any, chance: random.Random) -> None:
            act(case, chance)

        try:
            each()
        except Unsatisfiable:  # whatever is sent fits
            assert mode is GenerationMode.NEGATIVE


def _send(
    gateway: Gateway,
    client: httpx.Client,
    operation: Operation,
    world: World,
    outcome: Outcome,
    case: Any,
    chance: random.Random,
) -> None:
    """Send ``case`` about the things of ``world``: a body that fits names them, and three of four paths do."""
    draft = operation.draft(gateway.url, world)
    made = case.as_transport_kwargs(base_url=f"{gateway.url}{operation.mount}")
    url, params, body = httpx.URL(made["url"]), httpx.QueryParams(made["params"]), case.body
    if chance.random() < 0.75:
        url, params = draft.url.copy_with(query=None), params.merge(draft.url.params)
    if case.meta.generation.mode is GenerationMode.POSITIVE:
        for slot in operation.slots:
            if slot.where != "query":
                body = _named(body, slot.name.split("."), world[chance.choice(slot.kinds)])
    told = {name: draft.headers[name] for name in ("content-type", "x-amz-target") if name in draft.headers}
    headers = {**made["headers"], **told}
    try:
        content = _encoded(body, headers.get("content-type"))
        request = httpx.Request(operation.method, url, params=params, headers=headers, content=content)
    except (ValueError, TypeError, UnicodeError, httpx.InvalidURL):  # what no client could put on the wire
        return
    send(gateway, client, operation, keyed(operation, request, gateway.keys.owner), case.id, outcome)


def _named(body: Any, path: list[str], id: str) -> Any:
    """Return ``body`` with ``id`` where it has a text at ``path``."""
    if not path:
        return id if isinstance(body, str) else body
    if not isinstance(body, dict) or path[0] not in body:
        return body
    return {**body, path[0]: _named(body[path[0]], path[1:], id)}


def _encoded(body: Any, media_type: str | None) -> bytes | None:
    if isinstance(body, NotSet):
        return None
    if isinstance(body, bytes):
        return body
    if media_type == "application/x-protobuf":
        try:
            return json_format.ParseDict(body, pb.ForwardBackwardRequest()).SerializeToString()
        except json_format.ParseError:  # no such message: the same in JSON, which is as wrong
            pass
    return json.dumps(body).encode()
