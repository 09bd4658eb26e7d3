"""``rl.train`` on a stream of minibatches, two steps an iteration, with a penalty for leaving the base model."""

from tests.tinker_acceptance.arithmetic import FORMAT
from tests.tinker_acceptance.outcome import Outcome, rises
from tests.tinker_acceptance.place import RENDERER, Place, curve

MODULE = "tests.tinker_acceptance.drive tinker_cookbook.rl.train"


def run(place: Place, *, steps: int = 8, groups: int = 16, size: int = 8) -> list[Outcome]:
    options = {
        "model_name": place.model,
        "recipe_name": "acceptance_minibatches",
        "renderer_name": RENDERER,
        "lora_rank": place.rank,
        "dataset_builder": "tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder",
        "dataset_builder.batch_size": groups,
        "dataset_builder.group_size": size,
        "dataset_builder.n_batches": steps,
        "dataset_builder.model_name_for_tokenizer": place.model,
        "dataset_builder.renderer_name": RENDERER,
        "learning_rate": 3e-4,
        "max_tokens": 8,
        "loss_fn": "importance_sampling",
        "num_substeps": 2,
        "stream_minibatch_config.groups_per_batch": groups,
        "stream_minibatch_config.num_minibatches": 2,
        "kl_penalty_coef": 0.01,
        "kl_reference_config.base_model": place.model,
        "compute_post_kl": True,
        "eval_every": 0,
        "save_every": 0,
    }
    log = place.finish("minibatches", MODULE, options)
    leaving = curve(log, "kl_policy_base")
    return [
        rises(FORMAT, curve(log, FORMAT), by=0.15, over=2),
        Outcome(
            what="kl_policy_base",
            before=leaving[0],
            after=leaving[-1],
            bar="0, then > 0",
            learned=abs(leaving[0]) < 0.05 < leaving[-1],
        ),
    ]
