"""A plan's work in the words of the ``tinker`` SDK's wire, and its answers in the native surface's. Pure."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from gateway.wire.tinker import wire_pb2 as pb
from tests.crash.plan import Sample, Step

PROTOBUF = "application/x-protobuf"
LOST = 410  # what a sample is answered with that is to be drawn anew, under another number


def batch(model: str, step: Step) -> bytes:
    """Return the body of a forward or forward_backward."""
    message = pb.ForwardBackwardRequest(
        model_id=model,
        seq_id=step.seq - 1,
        loss_fn=step.body.get("loss_fn", "cross_entropy"),
        forward_only=step.verb == "forward",
    )
    for given in step.body["data"]:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = _packed("i", given["model_input"])
        for name, values in given["loss_fn_inputs"].items():
            kind, dtype = ("q", pb.DTYPE_INT64) if name == "target_tokens" else ("f", pb.DTYPE_FLOAT32)
            tensor = pb.Tensor(dense=_packed(kind, values), dtype=dtype, shape=[len(values)])
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    return message.SerializeToString()


def work(model: str, step: Step) -> tuple[str, Mapping[str, Any]]:
    """Return route and body of any other operation. What is saved is named or numbered by its seq."""
    body: dict[str, Any] = {"model_id": model, "seq_id": step.seq - 1}
    match step.verb:
        case "optim_step":
            return "optim_step", {**body, **step.body}
        case "save_state":
            return "save_weights", {**body, "path": _name(step.seq)}
        case "save_weights" if step.body.get("publish") == "lazy":
            return "save_weights_for_sampler", {**body, "path": _name(step.seq)}
        case "save_weights":
            return "save_weights_for_sampler", {**body, "sampling_session_seq_id": step.seq}
        case "load_state":
            path = f"tinker://{model}/weights/{_name(step.needs)}"
            return "load_weights", {**body, "path": path, "optimizer": step.body["optimizer"]}
        case _:
            raise ValueError(step.verb)


def question(sampler: str, attempt: int, sample: Sample) -> Mapping[str, Any]:
    """Return the body of an asample."""
    body = sample.body
    return {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": body["prompt"]}]},
        "sampling_params": {"max_tokens": body["max_tokens"], "seed": body["seed"]},
        "num_samples": body["num_samples"],
        "sampling_session_id": sampler,
        "seq_id": attempt,
    }


def told(response: httpx.Response) -> Mapping[str, Any]:
    """Read what a future says; of protobuf only that it is one."""
    if PROTOBUF in response.headers["content-type"]:
        return {"type": "protobuf"}
    return response.json()


def drawn(response: httpx.Response, id: str, sample: Sample) -> Mapping[str, Any]:
    """Read what a sample's future says, as the native surface would have written it."""
    if response.status_code == LOST:
        return {"type": "lost"}
    if PROTOBUF not in response.headers["content-type"]:
        return response.json()
    sequences = [
        {"tokens": _unpacked("i", one.tokens), "logprobs": _unpacked("f", one.logprobs), "stop_reason": one.stop_reason}
        for one in pb.SampleResponse.FromString(response.content).sequences
    ]
    sampled = sum(len(one["tokens"]) for one in sequences)
    usage = {"prefill": len(sample.body["prompt"]), "cached_prefill": 0, "sample": sampled}
    return {"id": id, "sequences": sequences, "usage": usage}


def _name(seq: int) -> str:
    return f"at-{seq}"


def _packed(kind: str, values: Sequence[Any]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


def _unpacked(kind: str, data: bytes) -> list[Any]:
    return list(struct.unpack(f"<{len(data) // 4}{kind}", data))
