"""Slices of ``make registry-acceptance``: the registry's promises on gateway, trainer and vLLM, in float32."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import loopline
from tests.registry import crowd, prefixes, travels
from tests.registry.world import mean, words, world_of, worst
from tests.stack import Stack

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_more_versions_than_slots_answer_each_for_itself_while_others_are_published(tiny_stack: Stack) -> None:
    with world_of(tiny_stack) as world:
        quiet = crowd.teach(world, 3)
        assert crowd.control(world, quiet) == []

        seen = crowd.run(world, quiet, requests=40, publications=3)

    assert (seen.asked, list(seen.wrong), len(seen.published)) == (40, [], 3)
    assert seen.smallest_margin >= 2.0


def test_successive_versions_with_one_long_prefix_answer_with_their_own_weights(tiny_stack: Stack) -> None:
    with world_of(tiny_stack) as world:
        found = prefixes.versions(world, 3, group="prefixes")

    for (version, engines, trainers), (_, before, _) in zip(found[1:], found, strict=False):
        assert worst(engines, trainers) < 1e-3, version
        assert mean(engines, before) > 0.01, version


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning:peft")
@pytest.mark.parametrize("unembed", [False, True], ids=["projections", "lm_head too"])
def test_an_adapter_leaves_to_peft_comes_back_and_answers_as_before(
    tiny_stack: Stack, tiny_model: Path, tmp_path: Path, unembed: bool
) -> None:
    subject, group = travels.tiny(tiny_model), f"travels-{'head' if unembed else 'body'}"
    with world_of(tiny_stack) as world, travels.service_of(world) as service:
        session = travels.trained(world, subject, unembed=unembed, group=group)
        trainers, version = travels.trainers_scores(world, session, subject), world.save(session)
        directory = tmp_path / "adapter"
        travels.downloaded(world, version, directory)

        assert mean(travels.by_peft(subject, directory), trainers) < subject.mean
        assert sorted(path.name for path in travels.archived(world, version, tmp_path).iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        back = service.versions.import_(group, directory, base_model=tiny_stack.base_model).version
        prompt = words(78, 12)
        left, came = world.answer(version, prompt), world.answer(back, prompt)
        assert left.tokens == came.tokens
        assert left.margin == pytest.approx(came.margin, abs=1e-3)
        assert mean(world.scores(back, travels.TOKENS), trainers) < subject.mean

        with service.create_training_client_from_state(back) as training:
            datum = loopline.Datum(travels.TOKENS[:-1], {"target_tokens": travels.TOKENS[1:], "weights": [1.0] * 39})
            before = training.forward([datum]).result().metrics["loss:sum"]
            training.forward_backward([datum])
            training.optim_step(loopline.AdamParams(learning_rate=5e-3))
            further = training.save_weights_for_sampler().result().version
            assert training.forward([datum]).result().metrics["loss:sum"] < before
        assert mean(world.scores(further, travels.TOKENS), trainers) > subject.mean


def test_a_peft_adapter_of_a_foreign_shape_is_refused_by_the_module(
    tiny_stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    subject = travels.tiny(tiny_model)
    with world_of(tiny_stack) as world, travels.service_of(world) as service:
        session = travels.trained(world, subject, unembed=False, group="shapes")
        travels.downloaded(world, world.save(session), tmp_path)
        config = json.loads((tmp_path / "adapter_config.json").read_bytes())
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        name = next(name for name in tensors if "up_proj.lora_A" in name)
        tensors[name] = tensors[name][:, :-1].contiguous()
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        assert config["r"] == 6
        with pytest.raises(loopline.OperationError, match=r"up_proj has 64 inputs in the base model, 63") as refused:
            service.versions.import_("shapes", tmp_path, base_model=tiny_stack.base_model)
        assert refused.value.code == "bad_adapter"
        groups = {group["name"]: group["versions"] for group in world.client.get("/model_packages").json()["data"]}
        assert groups["shapes"] == 1
