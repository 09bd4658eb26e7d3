"""Which models are opened at all."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GraniteConfig

from tests.tiny_model import FULL_VOCABULARY, smollm_directory
from tests.trainer.builders import VOCAB, A, batch, forward_backward, lora, tiny_base
from tests.trainer.conftest import make_backend


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_scales_its_logits_is_refused(dtype: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = GraniteConfig(vocab_size=VOCAB, num_key_value_heads=4, logits_scaling=2.0, initializer_range=0.5, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="changes its logits after the head"):
        make_backend(tiny_base(tmp_path, dtype=dtype))


def test_a_deep_model_is_not_refused_for_the_rounding_of_bfloat16() -> None:
    """Thirty layers on a senseless text: plain bfloat16 is 0.1 nats from float32, and so are two ways to compute it."""
    backend = make_backend(replace(tiny_base(smollm_directory(), dtype="bfloat16"), vocab_size=FULL_VOCABULARY))
    backend.open(A, lora())
    assert backend.forward_backward(A, forward_backward(batch(1))).metrics["loss:sum"] > 0
