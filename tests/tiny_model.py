"""The tiny base model of the tests: a real two-layer Llama in float32 that torch and vLLM both load in a moment.

With SmolLM2's 49,152 tokens it comes with that model's tokenizer and chat template, so every text route works on it.
A smaller vocabulary has no tokenizer; trainer tests use it where milliseconds count.
"""

import hashlib
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base_models import exclusive, resolve

if TYPE_CHECKING:
    from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
FULL_VOCABULARY = 49_152
CONTEXT_LENGTH = 2048
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
BOS, EOS = 1, 2


def tiny_config(vocab_size: int) -> "LlamaConfig":
    """The initial weights are large (standard deviation 0.2), so that logprobs differ clearly between tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )


def build_tiny_model(directory: Path, *, vocab_size: int = FULL_VOCABULARY, seed: int = 0) -> Path:
    """Write the model to ``directory``, which appears whole or not at all; same arguments, same bytes."""
    import torch
    from transformers import LlamaForCausalLM

    config = tiny_config(vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    model.save_pretrained(partial)
    if vocab_size == FULL_VOCABULARY:
        for name in TOKENIZER_FILES:
            shutil.copyfile(smollm_directory() / name, partial / name)
    partial.chmod(0o755)
    partial.rename(directory)
    return directory


def cached_tiny_model(*, vocab_size: int = FULL_VOCABULARY, seed: int = 0) -> Path:
    """Return the model from the checkout's cache, building it the first time."""
    recipe = Path(__file__).read_bytes() + f"{version('torch')} {version('transformers')}".encode()
    key = hashlib.sha256(recipe).hexdigest()[:12]
    directory = ROOT / ".cache" / "models" / f"tiny-{vocab_size}-{seed}-{key}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(directory.with_suffix(".lock")):
        if not directory.is_dir():
            build_tiny_model(directory, vocab_size=vocab_size, seed=seed)
    return directory


def smollm_directory() -> Path:
    """SmolLM2-135M-Instruct where `make setup` puts it, prepared now if it is not there."""
    data_dir = Path(os.environ.get("LOOPLINE_DATA_DIR") or ROOT / ".loopline")
    return resolve("smollm2-135m-instruct", data_dir / "models")
