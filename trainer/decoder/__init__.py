"""A lean decoder for LoRA training: shared prefixes once, no padding, no copy of frozen weights, tiled unembedding.

``LoraDecoder`` computes target log-probabilities that are differentiable in the adapter's masters; ``supports`` tells
for which transformers configs. Everything else stays with the plain PEFT path.
"""

from trainer.decoder.decoder import LoraDecoder
from trainer.decoder.plan import Ids, MicroBatch, PlanSettings, plan
from trainer.decoder.precision import default_compute_dtype
from trainer.decoder.rows import fused_beyond
from trainer.decoder.run import DecoderSettings
from trainer.decoder.weights import supports

__all__ = [
    "DecoderSettings",
    "Ids",
    "LoraDecoder",
    "MicroBatch",
    "PlanSettings",
    "default_compute_dtype",
    "fused_beyond",
    "plan",
    "supports",
]
