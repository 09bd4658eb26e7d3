"""``preference.train_dpo`` on a file of comparisons: the preferred answers win more and more."""

from tests.tinker_acceptance.chats import common_config, comparisons
from tests.tinker_acceptance.outcome import Outcome, falls, rises
from tests.tinker_acceptance.place import RENDERER, Place, curve

MODULE = "tests.tinker_acceptance.drive tinker_cookbook.preference.train_dpo"


def run(place: Place, *, steps: int = 8, batch: int = 8, below: float = 0.8) -> list[Outcome]:
    builder = "dataset_builder.comparison_builder"
    options = {
        "model_name": place.model,
        "recipe_name": "acceptance_preference",
        "renderer_name": RENDERER,
        "lora_rank": place.rank,
        "dataset_builder": "tinker_cookbook.preference.dpo_datasets:DPODatasetBuilderFromComparisons",
        **common_config(place, "dataset_builder", batch),
        builder: "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl",
        f"{builder}.train_path": comparisons(place.work / "comparisons.jsonl", steps * batch),
        "learning_rate": 5e-4,
        "eval_every": 0,
        "save_every": 0,
    }
    log = place.finish("preference", MODULE, options)
    return [
        falls("dpo_loss", curve(log, "dpo_loss"), below=below),
        rises("margin", curve(log, "margin"), by=0.35, over=1),
    ]
