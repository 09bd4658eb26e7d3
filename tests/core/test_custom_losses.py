"""Documents of custom losses: what is written is read again, and what is not allowed is refused by node."""

import copy
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.codec import decode_payload, encode_payload
from gateway.core.custom_losses import MAX_NODES, MAX_VALUES
from gateway.core.errors import Invalid
from gateway.core.loss_documents import dump_loss, load_loss, read_loss, write_loss
from gateway.core.payloads import ForwardBackward
from gateway.core.tensors import Datum, TensorData
from gateway.core.validation import check_forward
from tests.core.builders import MODEL

NEG_LL: dict[str, Any] = {
    "name": "neg_ll",
    "inputs": [["logprobs", 1, "logprobs"], ["weights", 1, "w"], ["beta", 0, "beta"]],
    "nodes": [
        ["getitem", "operator.getitem", [{"ref": "w"}, {"tuple": [{"slice": [1, None, -2]}, {"ellipsis": True}]}], {}],
        ["mul", "operator.mul", [{"ref": "logprobs"}, {"ref": "w"}], {}],
        ["sum_1", "Tensor.sum", [{"ref": "mul"}], {"dim": [0], "keepdim": False, "dtype": {"dtype": "float64"}}],
        ["mul_1", "operator.mul", [{"ref": "sum_1"}, -0.5], {}],
    ],
    "loss": "mul_1",
    "metrics": [["custom/neg_ll:sum", "sum_1"], ["custom/beta:mean", "beta"]],
}


def with_node(*row: Any) -> dict[str, Any]:
    """The document with one more node, called ``bad``."""
    document = copy.deepcopy(NEG_LL)
    document["nodes"].append(["bad", *row])
    return document


def test_a_loss_is_written_as_it_was_read() -> None:
    loss = read_loss(NEG_LL)
    assert write_loss(loss) == NEG_LL
    assert load_loss(dump_loss(loss)) == loss
    assert dump_loss(load_loss(dump_loss(loss))) == dump_loss(loss)


X = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (["torch.load", ["x"], {}], "'torch.load' is not among the operations"),
        (["os.system", ["true"], {}], "not among the operations"),
        (["Tensor.backward", [X], {}], "not among the operations"),
        (["Tensor.exp_", [X], {}], "not among the operations"),
        (["Tensor.__class__", [X], {}], "not among the operations"),
        (["torch.exp", [{"ref": "bad"}], {}], "'bad', which does not come before it: a loss has no cycles"),
        (["torch.exp", [{"ref": "later"}], {}], "'later', which does not come before it"),
        (["torch.exp", [X], {"out": {"ref": "w"}}], "takes no option 'out'"),
        (["operator.mul", [X, {"float": "inf"}], {}], "inf is not finite"),
        (["operator.mul", [X, float("nan")], {}], "must be finite"),
        (["operator.mul", [X, 1e400], {}], "must be finite"),
        (["operator.mul", [X, 2**40], {}], "within 2147483648"),
        (["getattr", [X, "__class__"], {}], "getattr reads one of"),
        (["getattr", [X, "grad"], {}], "getattr reads one of"),
        (["getattr", [X, "data"], {}], "getattr reads one of"),
        (["getattr", ["shape", X], {}], "getattr reads one of"),
        (["Tensor.to", [X, {"device": "cuda:0"}], {}], "device 'cuda:0' is no argument"),
        (["Tensor.to", [X, {"dtype": "complex64"}], {}], "dtype 'complex64' is no argument"),
        (["torch.exp", [{"pickle": "gASV"}], {}], "pickle 'gASV' is no argument"),
        (["torch.exp", [X, "not a word!"], {}], "texts short words"),
        (["torch.sum", [X, [[[[[[0]]]]]]], {}], "nested deeper than 4"),
        (["torch.sum", [X, [0] * MAX_VALUES], {}], f"more than {MAX_VALUES} values"),
        (["torch.sum", {}, {}], "arguments must be a list"),
    ],
)
def test_a_node_that_is_not_allowed_is_refused_by_name(row: list[Any], says: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_loss(with_node(*row))
    assert (refused.value.code, refused.value.field, refused.value.details) == (
        "bad_loss_graph",
        "graph",
        {"node": "bad"},
    )
    assert refused.value.message.startswith("node 'bad': ")
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "logprobs"}, "loss must name a node"),
        ({"loss": "nothing"}, "loss must name a node, got 'nothing'"),
        ({"metrics": [["loss:sum", "mul"]]}, "must be called custom/<name>:sum"),
        ({"metrics": [["custom/a:max", "mul"]]}, "must be called custom/<name>:sum"),
        ({"metrics": [["custom/a:sum", "nothing"]]}, "must name a node, got 'nothing'"),
        ({"metrics": [["custom/a:sum", "mul"]] * 2}, "different names"),
        ({"inputs": [["weights", 1, "w"]]}, "the first input must be logprobs"),
        ({"inputs": [["logprobs", 0, "logprobs"]]}, "logprobs: 1 or 2"),
        ({"inputs": [["logprobs", 1, "x"], ["w", 3, "w"]]}, "must have rank 0, 1 or 2"),
        ({"inputs": [["logprobs", 1, "x"], ["w", True, "w"]]}, "must have rank 0, 1 or 2"),
        ({"inputs": [["logprobs", 1, "x"], ["w", 1, "x"]]}, "different names"),
        ({"inputs": [["logprobs", 1, "x"], *([f"w{n}", 1, f"w{n}"] for n in range(16))]}, "at most 16, got 17"),
        ({"nodes": [[f"n{at}", "torch.exp", [X], {}] for at in range(MAX_NODES + 1)]}, "at most 256, got 257"),
        ({"nodes": [["logprobs", "torch.exp", [X], {}]]}, "another node or input has this name"),
        ({"nodes": [["a b", "torch.exp", [X], {}]]}, "short name of letters"),
        ({"nodes": [["a", "torch.exp", [X]]]}, "lists of 4"),
        ({"name": ""}, "printable"),
        ({"name": "a\0"}, "printable"),
    ],
)
def test_a_document_that_is_none_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_loss({**NEG_LL, **changes})
    assert refused.value.code == "bad_loss_graph"
    assert says in refused.value.message


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["w", "mul", "ref"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(
    part=st.sampled_from(list(NEG_LL)),
    value=json_values,
    row=st.none() | st.lists(json_values, min_size=4, max_size=4),
)
def test_whatever_is_sent_is_read_or_refused(part: str, value: Any, row: list[Any] | None) -> None:
    document = {**NEG_LL, part: value} if row is None else {**NEG_LL, "nodes": [*NEG_LL["nodes"], row]}
    with suppress(Invalid):
        loss = read_loss(document)
        assert read_loss(write_loss(loss)) == loss


def payload(**inputs: TensorData) -> ForwardBackward:
    given = {
        "target_tokens": TensorData.ints([1, 2, 3]),
        "weights": TensorData.floats([0.5, 0.25, 0.0]),
        "beta": TensorData.floats([0.5], ()),
        **inputs,
    }
    datum = Datum(model_input=TensorData.ints([4, 5, 6]), loss_fn_inputs=given)
    return ForwardBackward(data=(datum,), loss_fn=read_loss(NEG_LL), loss_fn_config={})


def test_a_batch_carries_its_loss_through_the_log() -> None:
    check_forward(payload(), MODEL)
    assert decode_payload(encode_payload(payload())) == payload()


def test_an_input_may_have_any_size_of_its_rank() -> None:
    check_forward(payload(weights=TensorData.floats([1.0] * 7)), MODEL)


@pytest.mark.parametrize(
    ("inputs", "field", "code"),
    [
        ({"other": TensorData.floats([1.0])}, "other", "unknown_loss_input"),
        ({"beta": TensorData.floats([1.0])}, "beta", "length_mismatch"),
        ({"weights": TensorData.floats([1.0] * 6, (3, 2))}, "weights", "length_mismatch"),
        ({"target_tokens": TensorData.ints([1] * 6, (3, 2))}, "target_tokens", "length_mismatch"),
        ({"target_tokens": TensorData.ints([1, 2])}, "target_tokens", "length_mismatch"),
        ({"target_tokens": TensorData.ints([1, 2, 512])}, "target_tokens[2]", "token_out_of_vocabulary"),
        ({"target_tokens": TensorData.floats([1, 2, 3])}, "target_tokens", "invalid_request"),
        ({"weights": TensorData.floats([1.0, float("inf"), 0.0])}, "weights[1]", "non_finite"),
    ],
)
def test_a_batch_that_does_not_fit_its_loss_is_refused_by_place(
    inputs: dict[str, TensorData], field: str, code: str
) -> None:
    with pytest.raises(Invalid) as refused:
        check_forward(payload(**inputs), MODEL)
    assert (refused.value.field, refused.value.code) == (f"data[0].loss_fn_inputs.{field}", code)
    assert refused.value.details["datum"] == 0


def test_what_the_loss_reads_must_be_there_and_it_has_no_settings() -> None:
    whole = payload()
    datum = whole.data[0]
    for name in ("target_tokens", "weights", "beta"):
        less = {key: value for key, value in datum.loss_fn_inputs.items() if key != name}
        bare = Datum(model_input=datum.model_input, loss_fn_inputs=less)
        with pytest.raises(Invalid, match=f"needs loss_fn_inputs.{name}"):
            check_forward(ForwardBackward(data=(bare,), loss_fn=whole.loss_fn, loss_fn_config={}), MODEL)
    with pytest.raises(Invalid, match="no settings"):
        check_forward(ForwardBackward(data=whole.data, loss_fn=whole.loss_fn, loss_fn_config={"beta": 1.0}), MODEL)
