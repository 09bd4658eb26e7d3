"""LoRA configurations as columns, shared by sessions and versions."""

from typing import Any

from sqlalchemy import RowMapping

from gateway.core.sessions import LoraConfig


def lora_columns(lora: LoraConfig) -> dict[str, Any]:
    return {
        "lora_rank": lora.rank,
        "lora_alpha": float(lora.alpha),
        "lora_train_attn": lora.train_attn,
        "lora_train_mlp": lora.train_mlp,
        "lora_train_unembed": lora.train_unembed,
        "lora_seed": lora.seed,
        "lora_use_rslora": lora.use_rslora,
    }


def lora_of(row: RowMapping) -> LoraConfig:
    return LoraConfig(
        rank=row["lora_rank"],
        alpha=row["lora_alpha"],
        train_attn=row["lora_train_attn"],
        train_mlp=row["lora_train_mlp"],
        train_unembed=row["lora_train_unembed"],
        seed=row["lora_seed"],
        use_rslora=bool(row["lora_use_rslora"]),  # null in rows from before there was a choice
    )
