"""What all clients of one ServiceClient share: the background loop, the transport, the sampling slots, tokenizers."""

import asyncio
import threading
from pathlib import Path
from typing import Any

from loopline._loop import BackgroundLoop
from loopline._tokenizer import download, load, require_transformers
from loopline._transport import Transport, segment
from loopline.results import ModelPackage


class Connection:
    """One gateway, one key, one event-loop thread."""

    def __init__(
        self, transport: Transport, *, sample_timeout_s: float, max_concurrent_samples: int, cache_dir: Path
    ) -> None:
        self.transport = transport
        self.sample_timeout_s = sample_timeout_s
        self.loop = BackgroundLoop(transport.aclose)
        self.sampling_slots = asyncio.Semaphore(max_concurrent_samples)
        self._cache_dir = cache_dir
        self._tokenizers: dict[str, Any] = {}
        self._tokenizers_lock = threading.Lock()

    def tokenizer(self, base_model: str) -> Any:
        """Return the transformers tokenizer of a base model, fetched once. Blocks.

        Raises:
            ImportError: transformers is not installed.
            LooplineError: the gateway did not hand the files out.
        """
        with self._tokenizers_lock:
            if base_model not in self._tokenizers:
                require_transformers()
                directory = self.loop.run(download(self.transport, base_model, self._cache_dir))
                self._tokenizers[base_model] = load(directory)
            return self._tokenizers[base_model]

    async def package(self, version: str, *, during: str) -> ModelPackage:
        """Return what the gateway knows about ``group@n``.

        Raises:
            ValueError: ``version`` is not of this form.
            ApiError: there is no such version.
        """
        group, at, number = version.rpartition("@")
        if not at or not number.isdecimal():
            raise ValueError(f"{during}: a version is written group@n here, got {version!r}")
        return await self.transport.get(ModelPackage, f"/model_packages/{segment(group)}/{number}", during=during)
