"""The real scorer against plain transformers and PEFT, in float32."""

import random
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from gateway.core.catalog import BaseModel
from gateway.core.errors import Invalid
from gateway.core.ids import VersionId
from gateway.core.scores import ScoreRequest, score_alternatives, score_targets
from gateway.core.sessions import LoraConfig
from gateway.core.tensors import TensorData
from tests.trainer.builders import VOCAB, A, B, batch, forward, forward_backward, lora
from tests.trainer.conftest import make_backend
from tests.trainer.test_backend import trained
from trainer.batching import to_tensor
from trainer.peft_backend import PeftBackend

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning:peft")

VERSION = VersionId("ver-scored")
CONFIGS = {
    "attn-mlp": lora(),
    "all-tied": lora(unembed=True),
    "odd-scale": lora(rank=3, alpha=7.0, unembed=True),
    "rslora": lora(rank=3, alpha=3.0, unembed=True, rslora=True),
}


def tokens_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def reference(base: BaseModel, adapter: Path | None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()


def expected(model: torch.nn.Module, request: ScoreRequest) -> torch.Tensor:
    tokens, targets = to_tensor(request.tokens), to_tensor(request.targets)
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0].float()
    logprobs = (logits / request.temperature).log_softmax(-1)
    return logprobs.gather(1, targets.view(len(tokens), -1)).view(targets.shape)


def exported(backend: PeftBackend, config: LoraConfig, directory: Path) -> None:
    backend.open(A, config)
    trained(backend, A)
    backend.write_adapter(A, directory)


def assert_scored(backend: PeftBackend, model: torch.nn.Module, request: ScoreRequest) -> None:
    found = backend.scorer.score(request)
    assert found.shape == request.targets.shape
    torch.testing.assert_close(to_tensor(found), expected(model, request), rtol=1e-5, atol=1e-5)


def test_the_likeliest_tokens_are_those_of_plain_peft(backend: PeftBackend, base: BaseModel, tmp_path: Path) -> None:
    exported(backend, CONFIGS["all-tied"], tmp_path)
    backend.scorer.attach(VERSION, CONFIGS["all-tied"], tmp_path)
    tokens = tokens_of(2, 33)
    found = backend.scorer.likeliest(score_targets(base, VERSION, tokens[:-1], tokens[1:], likeliest=5))
    with torch.no_grad():
        logits = reference(base, tmp_path)(input_ids=torch.tensor([tokens[:-1]])).logits[0]
    best = logits.log_softmax(-1).topk(5)
    assert to_tensor(found.tokens).tolist() == best.indices.tolist()
    torch.testing.assert_close(to_tensor(found.logprobs), best.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("config", [None, *CONFIGS.values()], ids=["base", *CONFIGS])
def test_scores_equal_plain_peft(
    backend: PeftBackend, base: BaseModel, tmp_path: Path, config: LoraConfig | None, temperature: float
) -> None:
    version = None if config is None else VERSION
    if config is not None:
        exported(backend, config, tmp_path)
        backend.scorer.attach(VERSION, config, tmp_path)
    model = reference(base, None if config is None else tmp_path)
    tokens = tokens_of(1, 33)
    rows = [tokens_of(seed, 5) for seed in range(33)]

    assert_scored(backend, model, score_targets(base, version, tokens[:-1], tokens[1:], temperature=temperature))
    assert_scored(backend, model, score_alternatives(base, version, tokens, rows, temperature=temperature))


def test_a_prompt_longer_than_a_micro_batch_is_scored_as_one(base: BaseModel, tmp_path: Path) -> None:
    backend = make_backend(base, micro_batch_tokens=16)
    config = CONFIGS["all-tied"]
    exported(backend, config, tmp_path)
    backend.scorer.attach(VERSION, config, tmp_path)
    tokens = tokens_of(2, base.context_length)

    assert_scored(backend, reference(base, tmp_path), score_targets(base, VERSION, tokens, tokens[1:] + tokens[:1]))


def test_the_plain_way_scores_like_the_lean_one(base: BaseModel, tmp_path: Path) -> None:
    plain = PeftBackend(base, device=torch.device("cpu"), compute_dtype="float32", lean=False)
    exported(plain, CONFIGS["all-tied"], tmp_path)
    plain.scorer.attach(VERSION, CONFIGS["all-tied"], tmp_path)
    tokens = tokens_of(3, 20)
    rows = [tokens_of(seed, 3) for seed in range(20)]

    assert_scored(plain, reference(base, tmp_path), score_alternatives(base, VERSION, tokens, rows, temperature=1.5))


def test_scoring_between_two_passes_changes_no_bit_of_the_training(base: BaseModel, tmp_path: Path) -> None:
    quiet, busy = make_backend(base), make_backend(base)
    exported(busy, CONFIGS["all-tied"], tmp_path)
    payload = forward_backward(batch(3))
    asked = score_targets(base, VERSION, [1, 2, 3], [2, 3, 4])
    for backend in (quiet, busy):
        backend.open(B, lora(unembed=True))
    results = [quiet.forward_backward(B, payload), busy.forward_backward(B, payload)]
    busy.scorer.attach(VERSION, CONFIGS["all-tied"], tmp_path)
    first = busy.scorer.score(asked)
    results += [quiet.forward_backward(B, payload), busy.forward_backward(B, payload)]

    assert results[0] == results[1]
    assert results[2] == results[3]
    ours, theirs = quiet.state(B), busy.state(B)
    assert ours.window is not None
    assert theirs.window is not None
    assert all(torch.equal(a, b) for a, b in zip(ours.window, theirs.window, strict=True))
    assert busy.scorer.score(asked) == first
    busy.scorer.detach(VERSION)
    busy.scorer.detach(VERSION)


def test_a_prompt_that_cannot_fit_in_memory_is_refused_with_the_longest_that_fits(base: BaseModel) -> None:
    limited = PeftBackend(
        base,
        device=torch.device("cpu"),
        compute_dtype="float32",
        micro_batch_tokens=64,
        operation_bytes=112 << 20,
    )
    long = TensorData.ints([1] * 20_000)
    with pytest.raises(Invalid) as refused:
        limited.scorer.score(ScoreRequest(base_model=base.name, version_id=None, tokens=long, targets=long))

    assert (refused.value.code, refused.value.field) == ("memory_limit_exceeded", "prompt")
    assert refused.value.details["got"] == 20_000
    assert set(refused.value.details) == {"limit", "got"}
    assert refused.value.message.startswith("the prompt has 20000 tokens")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_saved_version_scores_what_its_session_computes(
    backend: PeftBackend, base: BaseModel, tmp_path: Path, config: LoraConfig
) -> None:
    exported(backend, config, tmp_path)
    backend.scorer.attach(VERSION, config, tmp_path)
    (datum,) = batch(5, lengths=(40,))
    computed = backend.forward(A, forward((datum,))).outputs[0]["logprobs"]

    targets = datum.loss_fn_inputs["target_tokens"]
    scored = backend.scorer.score(
        ScoreRequest(base_model=base.name, version_id=VERSION, tokens=datum.model_input, targets=targets)
    )

    torch.testing.assert_close(to_tensor(scored), to_tensor(computed), rtol=1e-5, atol=1e-5)
