"""Payloads, outcomes and scores as records: what the log stores, and what a digest is taken of."""

from collections.abc import Mapping
from typing import Any, assert_never

from gateway.core.custom_losses import CustomLoss
from gateway.core.errors import Kind
from gateway.core.ids import VersionId
from gateway.core.loss_documents import read_loss, write_loss
from gateway.core.payloads import (
    Forward,
    ForwardBackward,
    LoadState,
    LossFn,
    OptimStep,
    Payload,
    Publish,
    SaveState,
    SaveWeights,
    Upload,
    kind_of,
)
from gateway.core.records import CorruptRecord, Reader, Writer, reading
from gateway.core.results import Failure, ForwardResult, LoadStateResult, OptimStepResult, Outcome, SaveResult
from gateway.core.scores import Likeliest, ScoreOutcome, ScoreRequest, ScoreResult
from gateway.core.tensors import Datum
from gateway.core.versions import Labels


def encode_payload(payload: Payload) -> bytes:
    writer = Writer()
    header: dict[str, Any] = {"kind": kind_of(payload).value}
    match payload:
        case Forward() | ForwardBackward():
            header |= _loss_header(payload.loss_fn)
            header["config"] = {name: _canonical(value) for name, value in payload.loss_fn_config.items()}
            header["data"] = [
                [writer.tensor(datum.model_input), writer.named(datum.loss_fn_inputs)] for datum in payload.data
            ]
        case OptimStep():
            for name in _ADAM_FIELDS:
                header[name] = _canonical(getattr(payload, name))
            if payload.lora_plus_lr_ratio != 1.0:  # left out at its default: records from before it have equal digests
                header["lora_plus_lr_ratio"] = _canonical(payload.lora_plus_lr_ratio)
        case SaveWeights():
            header.update(
                group=payload.group,
                merge=payload.merge,
                publish=payload.publish.value,
                **_labels_header(payload.labels),
            )
            if payload.source is not None:
                header["source"] = [payload.source.location, payload.source.manifest_sha256]
        case SaveState():
            header.update(group=payload.group, **_labels_header(payload.labels))
        case LoadState():
            header.update(version_id=payload.version_id, optimizer=payload.optimizer)
        case _:
            assert_never(payload)
    return writer.finish(header)


def _loss_header(loss: LossFn | CustomLoss) -> dict[str, Any]:
    return {"custom_loss": write_loss(loss)} if isinstance(loss, CustomLoss) else {"loss_fn": loss.value}


def _labels_header(labels: Labels) -> dict[str, Any]:
    """Only what is set, but for the description: records from before there were labels have equal digests."""
    fields = {"name": labels.name, "metadata": dict(labels.user_metadata), "tags": labels.tags, "ttl_s": labels.ttl_s}
    given = {name: value for name, value in fields.items() if value not in (None, {}, ())}
    return {"description": labels.description, **given}


def _labels_of(header: Mapping[str, Any]) -> Labels:
    return Labels(
        name=header.get("name"),
        description=header["description"],
        user_metadata=header.get("metadata", {}),
        tags=tuple(header.get("tags", ())),
        ttl_s=header.get("ttl_s"),
    )


def _canonical(value: float) -> float:
    """Return ``value`` so that equal numbers have equal text: 1 as 1.0, and -0.0 as 0.0."""
    return float(value) + 0.0


_ADAM_FIELDS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")


def decode_payload(record: bytes | memoryview) -> Payload:
    """Read what ``encode_payload`` wrote. Its tensors are views of ``record``.

    Raises:
        CorruptRecord: the bytes are something else.
    """
    with reading(record) as reader:
        return _payload(reader)


def _payload(reader: Reader) -> Payload:
    header = reader.header
    match header.get("kind"):
        case "forward":
            return Forward(**_forward_fields(reader))
        case "forward_backward":
            return ForwardBackward(**_forward_fields(reader))
        case "optim_step":
            ratio = header.get("lora_plus_lr_ratio", 1.0)
            return OptimStep(**{name: header[name] for name in _ADAM_FIELDS}, lora_plus_lr_ratio=ratio)
        case "save_weights":
            return SaveWeights(
                group=header["group"],
                merge=header["merge"],
                publish=Publish(header["publish"]),
                labels=_labels_of(header),
                source=Upload(location=header["source"][0], manifest_sha256=header["source"][1])
                if "source" in header
                else None,
            )
        case "save_state":
            return SaveState(group=header["group"], labels=_labels_of(header))
        case "load_state":
            return LoadState(version_id=VersionId(header["version_id"]), optimizer=header["optimizer"])
        case other:
            raise CorruptRecord(f"unknown payload kind {other!r}")


def _forward_fields(reader: Reader) -> dict[str, Any]:
    header = reader.header
    data = tuple(
        Datum(model_input=reader.tensor(tokens), loss_fn_inputs=reader.named(inputs))
        for tokens, inputs in header["data"]
    )
    loss_fn = read_loss(header["custom_loss"]) if "custom_loss" in header else LossFn(header["loss_fn"])
    return {"data": data, "loss_fn": loss_fn, "loss_fn_config": header["config"]}


def encode_outcome(outcome: Outcome) -> bytes:
    writer = Writer()
    match outcome:
        case ForwardResult():
            header: dict[str, Any] = {
                "type": "forward",
                "outputs": [writer.named(output) for output in outcome.outputs],
                "metrics": dict(outcome.metrics),
            }
        case OptimStepResult():
            header = {"type": "optim_step", "step": outcome.optimizer_step, "metrics": dict(outcome.metrics)}
        case SaveResult():
            header = {
                "type": "save",
                "version_id": outcome.version_id,
                "group": outcome.group,
                "number": outcome.number,
                "seq": outcome.seq,
                "step": outcome.optimizer_step,
            }
        case LoadStateResult():
            header = {
                "type": "load_state",
                "version_id": outcome.version_id,
                "step": outcome.optimizer_step,
                "discarded": outcome.discarded_gradient,
            }
        case Failure():
            header = _failure_header(outcome)
        case _:
            assert_never(outcome)
    return writer.finish(header)


def decode_outcome(record: bytes) -> Outcome:
    """Read what ``encode_outcome`` wrote.

    Raises:
        CorruptRecord: the bytes are something else.
    """
    with reading(record) as reader:
        return _outcome(reader)


def _outcome(reader: Reader) -> Outcome:
    header = reader.header
    match header.get("type"):
        case "forward":
            return ForwardResult(
                outputs=tuple(reader.named(output) for output in header["outputs"]), metrics=header["metrics"]
            )
        case "optim_step":
            return OptimStepResult(optimizer_step=header["step"], metrics=header["metrics"])
        case "save":
            return SaveResult(
                version_id=VersionId(header["version_id"]),
                group=header["group"],
                number=header["number"],
                seq=header["seq"],
                optimizer_step=header["step"],
            )
        case "load_state":
            return LoadStateResult(
                version_id=VersionId(header["version_id"]),
                optimizer_step=header["step"],
                discarded_gradient=header["discarded"],
            )
        case "failure":
            return _failure(header)
        case other:
            raise CorruptRecord(f"unknown outcome type {other!r}")


def encode_score_request(request: ScoreRequest) -> bytes:
    writer = Writer()
    header = {
        "kind": "score",
        "base_model": request.base_model,
        "version_id": request.version_id,
        "tokens": writer.tensor(request.tokens),
        "targets": writer.tensor(request.targets),
        "temperature": _canonical(request.temperature),
    }
    return writer.finish(header | ({"likeliest": request.likeliest} if request.likeliest else {}))


def decode_score_request(record: bytes) -> ScoreRequest:
    """Read what ``encode_score_request`` wrote.

    Raises:
        CorruptRecord: the bytes are something else.
    """
    with reading(record) as reader:
        header = reader.header
        if header.get("kind") != "score":
            raise CorruptRecord(f"not a score: {header.get('kind')!r}")
        return ScoreRequest(
            base_model=header["base_model"],
            version_id=None if header["version_id"] is None else VersionId(header["version_id"]),
            tokens=reader.tensor(header["tokens"]),
            targets=reader.tensor(header["targets"]),
            temperature=header["temperature"],
            likeliest=header.get("likeliest", 0),
        )


def encode_score_outcome(outcome: ScoreOutcome) -> bytes:
    writer = Writer()
    match outcome:
        case ScoreResult():
            header = {"type": "score", "logprobs": writer.tensor(outcome.logprobs)}
            if outcome.likeliest is not None:
                best = outcome.likeliest
                header["likeliest"] = [writer.tensor(best.tokens), writer.tensor(best.logprobs)]
            return writer.finish(header)
        case Failure():
            return writer.finish(_failure_header(outcome))


def decode_score_outcome(record: bytes) -> ScoreOutcome:
    """Read what ``encode_score_outcome`` wrote.

    Raises:
        CorruptRecord: the bytes are something else.
    """
    with reading(record) as reader:
        match reader.header.get("type"):
            case "score":
                logprobs = reader.tensor(reader.header["logprobs"])
                return ScoreResult(logprobs=logprobs, likeliest=_likeliest(reader))
            case "failure":
                return _failure(reader.header)
            case other:
                raise CorruptRecord(f"unknown score outcome {other!r}")


def _likeliest(reader: Reader) -> Likeliest | None:
    """Read what a score ranked; tensors come in the order in which they were written."""
    written = reader.header.get("likeliest")
    if written is None:
        return None
    tokens, logprobs = (reader.tensor(each) for each in written)
    return Likeliest(tokens=tokens, logprobs=logprobs)


def _failure_header(failure: Failure) -> dict[str, Any]:
    return {
        "type": "failure",
        "kind": failure.kind.value,
        "code": failure.code,
        "message": failure.message,
        "field": failure.field,
        "details": dict(failure.details),
    }


def _failure(header: Mapping[str, Any]) -> Failure:
    return Failure(
        kind=Kind(header["kind"]),
        code=header["code"],
        message=header["message"],
        field=header["field"],
        details=header["details"],
    )
