"""Which modules of a base model an adapter may change, by the last part of their path, and the switch of each."""

from collections.abc import Iterable

from gateway.core.adapter_files import AdapterLayout, BadAdapter
from gateway.core.sessions import LoraConfig

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
UNEMBEDDING = frozenset({"lm_head"})


def lora_of(layout: AdapterLayout, *, seed: int) -> LoraConfig:
    """Return the configuration of a session that can train on an adapter.

    Raises:
        BadAdapter: it changes a module that is not trained here.
        Invalid: rank or alpha out of range.
    """
    known = ATTENTION | MLP | UNEMBEDDING
    for path in layout.modules:
        if _last(path) not in known:
            raise BadAdapter(f"{path[:200]} is not trained here; there are: {', '.join(sorted(known))}", field=path)
    return LoraConfig(
        rank=layout.rank,
        alpha=layout.alpha,
        train_attn=_any(layout.modules, ATTENTION),
        train_mlp=_any(layout.modules, MLP),
        train_unembed=_any(layout.modules, UNEMBEDDING),
        seed=seed,
        use_rslora=layout.use_rslora,
    )


def _any(paths: Iterable[str], names: frozenset[str]) -> bool:
    return any(_last(path) in names for path in paths)


def _last(path: str) -> str:
    return path.rpartition(".")[2]
