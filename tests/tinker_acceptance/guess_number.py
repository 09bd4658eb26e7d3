"""``recipes.multiplayer_rl.guess_number``: up to ten turns an episode, each of which should be a guess as asked for.

A base model of this size writes none by itself, and then no episode is better than another. So it is fine-tuned first
until it does so about every other time, and the program resumes from that state.
"""

import json
import random

import tinker
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import FAIL_TO_PARSE, SYSTEM_PROMPT
from tinker_cookbook.renderers import Message, Renderer, get_renderer
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tests.tinker_acceptance.arithmetic import REWARD
from tests.tinker_acceptance.outcome import Outcome, rises
from tests.tinker_acceptance.place import RENDERER, Place, curve
from tests.tinker_acceptance.sessions import program, step

MODULE = "tinker_cookbook.recipes.multiplayer_rl.guess_number.train"
WAYS = ("Guess: {}", "My guess is {}")  # only the first is as asked
NUMBERS, TURNS, BATCH = 1025, 6, 16


def run(
    place: Place, *, lessons: int = 24, steps: int = 6, groups: int = 2, size: int = 6, by: float = 1.5
) -> list[Outcome]:
    log = place.log_path("guess_number")
    log.mkdir(parents=True)
    record = {"name": "lessons", "batch": 0, "state_path": _fine_tuned(place, lessons)}
    (log / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")
    options = {
        "behavior_if_log_dir_exists": "resume",
        "model_name": place.model,
        "renderer_name": RENDERER,
        "group_size": size,
        "batch_size": groups,
        "learning_rate": 3e-4,
        "max_tokens": 12,
        "max_steps": steps,
        "eval_every": 0,
        "save_every": 0,
    }
    place.finish("guess_number", MODULE, options)
    turns = curve(log, "env/all/turns_per_episode")
    assert max(turns) > 1, f"every episode ended after its first turn: {turns}"
    return [rises(REWARD, curve(log, REWARD), by=by, over=2)]  # chance moves the mean of two by some 0.3


def _fine_tuned(place: Place, lessons: int) -> str:
    """Return the path of the state after ``lessons`` batches."""
    rng, renderer = random.Random(1), get_renderer(RENDERER, get_tokenizer(str(place.model)))
    with program(place) as service:
        training = service.create_lora_training_client(str(place.model), rank=place.rank, seed=1).result()
        for _ in range(lessons):
            step(training, [_lesson(renderer, rng) for _ in range(BATCH)], 1e-3)
        return training.save_state("lessons").result().path


def _lesson(renderer: Renderer, rng: random.Random) -> tinker.Datum:
    """Return a game with its next guess, written in either way."""
    number = rng.randrange(NUMBERS)
    turns = [Message(role="system", content=SYSTEM_PROMPT)]
    for _ in range(rng.randrange(TURNS)):
        way, guess = rng.choice(WAYS), rng.randrange(NUMBERS)
        told = ("Too low" if guess < number else "Too high") if way is WAYS[0] else FAIL_TO_PARSE
        turns += [Message(role="player", content=way.format(guess)), Message(role="user", content=told)]
    guess = Message(role="assistant", content=rng.choice(WAYS).format(rng.randrange(NUMBERS)))
    return datum_from_model_input_weights(*renderer.build_supervised_example([*turns, guess]))
