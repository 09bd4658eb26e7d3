"""What the matrix knows of requests: which names are ids and of what, and a well-formed value for everything else."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gateway.wire.tinker import wire_pb2 as pb
from tests.core.test_adapter_files import tensors, write
from tests.tenancy.world import ADAPTERS, STATES
from tests.wire.test_transfers import archive_of
from tests.wire.training import BASE, datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A body that is not JSON with a schema: which ids it names, and its bytes."""

    ids: tuple[str, ...]
    media_type: str
    content: Callable[[Mapping[str, str]], bytes]


TURNS = itertools.count(1000)
"""A number that no request had before."""

NATIVE, OPENAI, TINKER, SIGNED = "/training/v1", "/v1", "/tinker", "/sagemaker"
SESSIONS = ("session", "session_name")

IDS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (NATIVE, "session_id"): SESSIONS,
    (NATIVE, "operation_id"): ("operation",),
    (NATIVE, "group"): ("group",),
    (NATIVE, "version"): ADAPTERS,
    (NATIVE, "address"): (*ADAPTERS, *STATES),
    (NATIVE, "after"): ("adapter_id",),
    (OPENAI, "model"): (*SESSIONS, *ADAPTERS),
    (TINKER, "session_id"): ("client",),
    (TINKER, "model_id"): ("model",),
    (TINKER, "run_id"): ("model",),
    (TINKER, "sampler_id"): ("sampler",),
    (TINKER, "sampling_session_id"): ("sampler",),
    (TINKER, "request_id"): ("tinker_operation", "sample", "session"),
    (TINKER, "model_path"): ("sampler_path",),
    (TINKER, "path"): ("state_path",),
    (TINKER, "tinker_path"): ("state_path", "sampler_path"),
    (TINKER, "project_id"): ("project",),
    (TINKER, "source_path"): ("state_path", "sampler_path"),
    (TINKER, "destination_project_id"): ("project",),
}
"""Which names are ids, of what. The first kind is what a well-formed request has."""

PATH_IDS: Mapping[tuple[str, str, str], tuple[str, ...]] = {
    (NATIVE, "/sessions", "after"): ("session",),
    (NATIVE, "/audit", "after"): (),  # a place in the order, not a thing
    (NATIVE, "/model_packages/{group}/history", "after"): ("event",),
    (NATIVE, "/sessions/{session_id}/load_state", "version"): STATES,
    (NATIVE, "/model_packages/{group}/aliases/{alias}", "version"): ("adapter_id", "adapter"),
    (NATIVE, "/model_packages/{group}/import", "group"): (),  # a name to take, not a thing
    (NATIVE, "/model_packages/{group}/import", "owner"): ("session_name",),
    (NATIVE, "/budgets/{scope}/{scope_id}", "scope_id"): ("session", "session_name"),
    (TINKER, "/api/v1/cancel_future", "request_id"): ("sample",),
    (TINKER, "/api/v1/save_weights_external", "path"): (),
    (TINKER, "/api/v1/save_weights_for_sampler", "path"): (),
    (TINKER, "/api/v1/save_weights", "path"): (),
    (TINKER, "/api/v1/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls", "name"): (
        "exported_name",
    ),
    (TINKER, "/api/v1/training_runs/{run_id}/checkpoints/{space}/{name}/archive", "name"): ("state_name",),
    (TINKER, "/api/v1/training_runs/{run_id}/checkpoints/{space}/{name}/publish", "name"): ("state_name",),
    (TINKER, "/api/v1/training_runs/{run_id}/checkpoints/{space}/{name}/ttl", "name"): ("state_name",),
    (TINKER, "/api/v1/training_runs/{run_id}/checkpoints/{space}/{name}", "name"): ("spare_name",),
}

PLAIN = frozenset(
    {
        "age_encryption_recipients",
        "alias",
        "arguments",
        "base_model",
        "body",
        "chat_template_kwargs",
        "choice",
        "description",
        "detail",
        "display_name",
        "file",
        "grammar",
        "id",
        "instructions",
        "json_schema",
        "kwargs",
        "metadata",
        "model_package_group",
        "month",
        "name",
        "parameters",
        "prompt",
        "reference",
        "regex",
        "safety_identifier",
        "scope",
        "sdk_version",
        "space",
        "stop",
        "tag",
        "tags",
        "target",
        "text",
        "tool_call_id",
        "type",
        "user",
        "user_metadata",
        "weights_access_token",
    }
)
"""Names of text that is no id of ours: words, labels, a client's own (of its tool calls), and numbers within something
that is named beside them."""

SAMPLES: Mapping[str, Any] = {
    "alias": "fresh",
    "base_model": BASE,
    "file": "tokenizer.json",
    "group": "fresh-group",
    "lora_config": {"rank": 8},
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "a"}],
    "model_seq_id": 7,
    "month": "2026-01",
    "name": BASE,
    "prompt": [97],
    "reason": {"type": "success"},
    "reference": "1",
    "sampling_params": {"max_tokens": 1},
    "sampling_session_seq_id": 7,
    "scope": "session",
    "sdk_version": "0",
    "space": "weights",
    "tags": [],
    "ttl_seconds": 3600,
    "user_metadata": None,
}


def _batch(ids: Mapping[str, str]) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=ids["model_id"], seq_id=next(TURNS), loss_fn="cross_entropy")
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = (97).to_bytes(4, "little")
    targets = (98).to_bytes(8, "little")
    one.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=targets, dtype=pb.DTYPE_INT64, shape=[1]))
    weights = b"\x00\x00\x80\x3f"
    one.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dense=weights, dtype=pb.DTYPE_FLOAT32, shape=[1]))
    return message.SerializeToString()


def _archive(ids: Mapping[str, str]) -> bytes:
    """An adapter, or nothing where it is not the owner's: his request alone must succeed."""
    if not ids["owner"].startswith("mine"):
        return b""
    with TemporaryDirectory() as directory:
        return archive_of(write(Path(directory), tensors()))


_PROTOBUF = Raw(ids=("model_id",), media_type="application/x-protobuf", content=_batch)

BODIES: Mapping[tuple[str, str, str], "Mapping[str, Any] | Raw"] = {
    (NATIVE, "POST", "/sessions"): {"lora": {"rank": 8}},
    (NATIVE, "POST", "/sessions/{session_id}/forward"): {"data": [datum()]},
    (NATIVE, "POST", "/sessions/{session_id}/forward_backward"): {"data": [datum()]},
    (NATIVE, "POST", "/sessions/{session_id}/sample"): {"max_tokens": 1},
    (NATIVE, "POST", "/sample"): {"max_tokens": 1, "version": "adapter"},
    (NATIVE, "POST", "/logprobs"): {"version": "adapter"},
    (NATIVE, "POST", "/model_packages/{group}/import"): Raw(
        ids=("owner",), media_type="application/x-tar", content=_archive
    ),
    (NATIVE, "PUT", "/budgets/{scope}/{scope_id}"): {"hard_nanos": 10**15},
    (OPENAI, "POST", "/completions"): {"max_tokens": 1, "prompt": "a"},
    (OPENAI, "POST", "/chat/completions"): {"max_tokens": 1},
    (OPENAI, "POST", "/responses"): {"max_output_tokens": 1, "input": "a"},
    (TINKER, "POST", "/api/v1/forward_backward"): _PROTOBUF,
    (TINKER, "POST", "/api/v1/create_custom_loss"): {
        "custom_loss_seq_id": 0,
        "name": "loss",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {
            "format": 1,
            "nodes": [
                {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
                {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}], "kwargs": {}},
                {
                    "op": "call_function",
                    "name": "neg",
                    "target": "operator.neg",
                    "args": [{"ref": "sum_1"}],
                    "kwargs": {},
                },
                {
                    "op": "output",
                    "name": "output",
                    "target": "output",
                    "args": [{"tuple": [{"ref": "neg"}, {"dict": {}}]}],
                    "kwargs": {},
                },
            ],
        },
    },
    (TINKER, "POST", "/api/v1/optim_step"): {"adam_params": {}, "seq_id": TURNS},
    (TINKER, "POST", "/api/v1/save_weights"): {"seq_id": TURNS},
    (TINKER, "POST", "/api/v1/save_weights_for_sampler"): {"seq_id": TURNS, "path": "more"},
    (TINKER, "POST", "/api/v1/save_weights_external"): {"seq_id": TURNS, "path": "outside"},
    (TINKER, "POST", "/api/v1/asample"): {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [97]}]},
        "sampling_session_id": "sampler",
        "seq_id": TURNS,
    },
    (TINKER, "POST", "/api/v1/create_sampling_session"): {"model_path": "sampler_path"},
    (TINKER, "POST", "/api/v1/load_weights"): {"model_id": "model", "seq_id": TURNS, "optimizer": True},
}
"""What a body needs beside its required fields. An id's value is filled in from the world."""

QUERIES: Mapping[tuple[str, str], Mapping[str, str]] = {
    (NATIVE, "/model_packages/{group}/import"): {"base_model": BASE},
    (TINKER, "/api/v1/billing/usage/events"): {
        "starting_on": "2026-01-01T00:00:00Z",
        "ending_before": "2026-01-02T00:00:00Z",
    },
}
"""What a query needs that is no id."""
