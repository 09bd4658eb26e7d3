"""Protobuf bodies to core payloads, and core results to protobuf bodies. Shapes and dtypes: ``wire.proto``."""

import itertools
import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from google.protobuf.message import DecodeError

from gateway.core.custom_losses import CustomLoss
from gateway.core.errors import Invalid
from gateway.core.payloads import Forward, ForwardBackward, LossFn
from gateway.core.results import ForwardResult
from gateway.core.sampling import Generation, StopReason
from gateway.core.tensors import Datum, DType, TensorData
from gateway.core.validation import TARGET_TOKENS
from gateway.wire.tinker import wire_pb2 as pb
from gateway.wire.tinker.questions import Question, Targets
from gateway.wire.tinker.tensors import Cells, from_csr, int32, int64

NO_LOGPROB = math.nan
EMPTY_CELL = -99999.0
_DTYPES: Mapping[int, DType] = {pb.DTYPE_FLOAT32: DType.FLOAT32, pb.DTYPE_INT64: DType.INT64}
_WIRE_DTYPES: Mapping[DType, pb.DType] = {DType.FLOAT32: pb.DTYPE_FLOAT32, DType.INT64: pb.DTYPE_INT64}
T = TypeVar("T")
_ENVELOPE = re.compile(rb"\x0a([\x01-\x7f])(.+)", re.DOTALL)  # field 1, a short text, and what follows
_SEQ = re.compile(rb"\x10([\x80-\xff]{0,4}[\x00-\x7f])")  # field 2, a number
FORWARD_ONLY = b"\x30\x01"  # field 6, how a batch ends that sets it and configures no loss
_INSTEAD = "use importance_sampling, ppo, cispo, dro or gspo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A batch and where it belongs. ``loss_id`` names its custom loss, if it has one."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss_id: str | None
    body: pb.ForwardBackwardRequest


def parse(raw: bytes) -> Submitted:
    """Read the envelope of a batch.

    Raises:
        Invalid: not such a message.
    """
    body = pb.ForwardBackwardRequest()
    try:
        body.ParseFromString(raw)
    except DecodeError:
        raise Invalid("the body is not a ForwardBackwardRequest") from None
    return Submitted(
        model_id=body.model_id,
        seq_id=body.seq_id,
        forward_only=body.forward_only,
        loss_id=body.loss_fn_config_v2["loss_id"].text if body.loss_fn == "custom" else None,
        body=body,
    )


def envelope(begins: bytes) -> tuple[str, int] | None:
    """Read the model and the number of a batch of which only the beginning is there; None: it does not say them."""
    if (found := _ENVELOPE.match(begins)) is None:
        return None
    length = found[1][0]
    seq = _SEQ.match(found[2], length)
    return None if seq is None else (begins[2 : 2 + length].decode(errors="replace"), _varint(seq[1]))


def _varint(digits: bytes) -> int:
    return sum((digit & 0x7F) << (7 * place) for place, digit in enumerate(digits))


def payload_of(submitted: Submitted, loss: CustomLoss | None) -> Forward | ForwardBackward:
    """Read the batch itself; ``loss`` is its custom loss, if it has one.

    Raises:
        Invalid: names the field, and the datum by index in ``details``.
    """
    body, cells = submitted.body, Cells()
    data = tuple(_datum(index, datum, cells) for index, datum in enumerate(body.data))
    return (Forward if submitted.forward_only else ForwardBackward)(
        data=data if loss is None else tuple(read_by(loss, datum) for datum in data),
        loss_fn=_loss_fn(body.loss_fn) if loss is None else loss,
        loss_fn_config=_config(body),
    )


def read_by(loss: CustomLoss, datum: Datum) -> Datum:
    """Return a datum with what ``loss`` reads: the client keeps the rest to itself where it evaluates a loss.

    A scalar's shape is not sent.
    """
    ranks = {each.name: each.rank for each in loss.inputs}
    read: dict[str, TensorData] = {}
    for name, tensor in datum.loss_fn_inputs.items():
        if name == TARGET_TOKENS or name in ranks:
            scalar = ranks.get(name) == 0 and tensor.shape == (1,)
            read[name] = replace(tensor, shape=()) if scalar else tensor
    return replace(datum, loss_fn_inputs=read)


def _loss_fn(name: str) -> LossFn:
    if name == "stable_reinforce":
        raise Invalid(
            f"the formula of stable_reinforce is not published, so it is not offered here: {_INSTEAD}",
            code="unknown_loss_fn",
            field="loss_fn",
        )
    known = [*(loss.value for loss in LossFn), "custom"]
    if name not in known:
        raise Invalid(
            f"no loss function {name[:80]!r}; known: {', '.join(known)}", code="unknown_loss_fn", field="loss_fn"
        )
    return LossFn(name)


def _config(body: pb.ForwardBackwardRequest) -> Mapping[str, float]:
    """The second map wins: the client writes numbers to both, text to that one alone."""
    config = dict(body.loss_fn_config)
    for name, value in body.loss_fn_config_v2.items():
        if name == "loss_id" and body.loss_fn == "custom":
            continue
        if value.WhichOneof("value") != "number":
            field = f"loss_fn_config.{name[:80]}"
            raise Invalid(f"{field} must be a number", field=field)
        config[name] = value.number
    return config


def _datum(index: int, datum: pb.Datum, cells: Cells) -> Datum:
    """Provenance spans are dropped: they serve a loss that is not offered here."""
    where = f"data[{index}]"
    try:
        return Datum(
            model_input=_model_input(datum.model_input, f"{where}.model_input"),
            loss_fn_inputs={
                name: _tensor(tensor, f"{where}.loss_fn_inputs.{name[:80]}", cells)
                for name, tensor in datum.loss_fn_inputs.items()
            },
        )
    except Invalid as error:
        error.details.setdefault("datum", index)
        raise


def _model_input(chunks: Iterable[pb.Chunk], where: str) -> TensorData:
    tokens: list[int] = []
    for index, chunk in enumerate(chunks):
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise Invalid(
                f"{where}.chunks[{index}] must be encoded text: this server's base models read text alone",
                code="unsupported_chunk",
                field=f"{where}.chunks[{index}]",
            )
        tokens += int32(chunk.encoded_text.tokens, f"{where}.chunks[{index}].tokens")
    return TensorData.ints(tokens)


def _tensor(tensor: pb.Tensor, field: str, cells: Cells) -> TensorData:
    if tensor.dtype not in _DTYPES:
        raise Invalid(f"{field}.dtype must be float32 or int64", field=field)
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("layout") == "sparse_csr":
        sparse = tensor.sparse_csr
        rows, columns = int64(sparse.crow_indices, field), int64(sparse.col_indices, field)
        return from_csr(sparse.values, rows, columns, shape=shape, dtype=dtype, field=field, cells=cells)
    try:
        return TensorData(dtype=dtype, shape=shape or (len(tensor.dense) // dtype.size_bytes,), data=tensor.dense)
    except Invalid as error:
        raise Invalid(f"{field}: {error.message}", code=error.code, field=field) from None


def encode_forward(result: ForwardResult) -> bytes:
    """Return a ``ForwardBackwardOutput``. Datums of unequal K go into records of their own, in request order."""
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)
    for _, rows in itertools.groupby(result.outputs, key=_trailing):
        outputs = list(rows)
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
        for name, first in outputs[0].items():
            parts = [row[name].data for row in outputs]
            record.fields[name].CopyFrom(
                pb.BatchedTensor(
                    data=b"".join(parts),
                    offsets=array("q", itertools.accumulate(map(len, parts), initial=0)).tobytes(),
                    dtype=_WIRE_DTYPES[first.dtype],
                    trailing_shape=first.shape[1:],
                )
            )
    return output.SerializeToString()


def _trailing(row: Mapping[str, TensorData]) -> Mapping[str, tuple[int, ...]]:
    return {name: tensor.shape[1:] for name, tensor in row.items()}


def encode_sample(generation: Generation, question: Question, targets: TensorData | None) -> bytes:
    """Return a ``SampleResponse``. ``targets`` are the scores of the question's targets, float32 in their shape."""
    request, last = question.request, question.last
    response = pb.SampleResponse(prompt_cache_hit_tokens=generation.counts.cached)
    for sequence in generation.sequences:
        drawn = response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason is StopReason.STOP else pb.STOP_REASON_LENGTH,
            tokens=array("i", sequence.tokens).tobytes(),
            logprobs=array("f", sequence.logprobs).tobytes(),
        )
        if sequence.topk is not None:
            drawn.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk, request.topk_logprobs))
    if generation.prompt_logprobs is not None:
        scores = [NO_LOGPROB if score is None else score for score in _last(generation.prompt_logprobs, last)]
        response.prompt_logprobs = array("f", scores).tobytes()
    if generation.topk_prompt_logprobs is not None:
        rows = _last(generation.topk_prompt_logprobs, last)
        response.topk_prompt_logprobs.CopyFrom(_topk(rows, request.topk_prompt_logprobs))
    if targets is not None and question.targets is not None:
        response.target_prompt_logprobs.CopyFrom(_scores(targets, question.targets))
    return response.SerializeToString()


def _scores(scores: TensorData, targets: Targets) -> pb.Tensor:
    """Return the scores in the layout of what was asked; a dense cell that asked nothing is 0."""
    asked = targets.asked
    answer = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=scores.shape)
    if asked.sparse_crow_indices is None:
        pairs = zip(scores.values(), targets.ids.values(), strict=True)
        answer.dense = array("f", [score if id >= 0 else 0.0 for score, id in pairs]).tobytes()
        return answer
    rows, columns, width = asked.sparse_crow_indices, asked.sparse_col_indices or [], scores.shape[1]
    cells = [row * width + columns[at] for row in range(len(rows) - 1) for at in range(rows[row], rows[row + 1])]
    values = scores.values()
    answer.sparse_csr.values = array("f", [values[cell] for cell in cells]).tobytes()
    answer.sparse_csr.crow_indices = array("q", rows).tobytes()
    answer.sparse_csr.col_indices = array("q", columns).tobytes()
    return answer


def _last(scores: Sequence[T], last: int | None) -> Sequence[T | None]:
    if last is None:
        return scores
    return [None] * (len(scores) - last) + list(scores[-last:])


def _topk(rows: Sequence[Mapping[int, float] | None], k: int) -> pb.TopkLogprobs:
    tokens: array[int] = array("i", [0]) * (len(rows) * k)
    logprobs = array("f", [EMPTY_CELL]) * (len(rows) * k)
    for index, row in enumerate(rows):
        best = sorted((row or {}).items(), key=lambda item: -item[1])[:k]
        for place, (token, logprob) in enumerate(best):
            tokens[index * k + place], logprobs[index * k + place] = token, logprob
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))
