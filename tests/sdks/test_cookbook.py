"""The recipes: short, self-explaining, and they do what they say. `make demo` runs the GRPO one in full."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import EngineEndpoint, running_stack

COOKBOOK = Path(__file__).resolve().parents[2] / "clients" / "cookbook"
RECIPES = sorted(COOKBOOK.glob("*.py"))


def run(recipe: Path, *arguments: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(recipe), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_explains_its_options(recipe: Path) -> None:
    assert len(recipe.read_text().splitlines()) < 150
    answer = run(recipe, "--help")
    assert answer.returncode == 0
    assert "--base-url" in answer.stdout
    assert "--seed" in answer.stdout


def test_the_cookbook_has_the_two_recipes() -> None:
    assert [recipe.stem for recipe in RECIPES] == ["grpo_arithmetic", "sft_chat"]


def test_a_missing_file_of_conversations_is_refused_before_anything_is_trained() -> None:
    answer = run(COOKBOOK / "sft_chat.py", "--data", "nowhere.jsonl", "--api-key", "tml-x")

    assert answer.returncode == 2
    assert "nowhere.jsonl" in answer.stderr


@pytest.mark.engine
def test_fine_tuning_lowers_the_loss_and_changes_the_answer(tiny_engine: EngineEndpoint, tmp_path: Path) -> None:
    with running_stack(tiny_engine, tmp_path / "stack") as stack:
        where = ("--base-url", stack.url, "--api-key", stack.key, "--base-model", stack.base_model)
        answer = run(COOKBOOK / "sft_chat.py", *where, "--learning-rate", "1e-2", timeout_s=300)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    losses = [float(loss) for loss in re.findall(r"^ *\d+  (\d+\.\d+)$", answer.stdout, re.MULTILINE)]
    assert len(losses) == 16
    assert losses[-1] < 0.7 * losses[0]
    (before,), (after,) = (re.findall(rf"{when}: (.*)", answer.stdout) for when in ("before", "after"))
    assert before != after
