"""``make registry-acceptance``: measure what the registry promises, print tables, fail where a bar is missed."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from gateway.engines.launch import EngineSpec, launch_vllm
from tests.crash.report import Verdict, show
from tests.engines.fixtures import endpoint_of, running_engine, smollm_spec, tiny_spec, vocab_size_of
from tests.registry import crowd, growth, prefixes, travels
from tests.registry.world import Publication, World, mean, percentile, world_of, worst
from tests.stack import running_stack
from tests.tiny_model import cached_tiny_model, smollm_directory

COMMAND = "make registry-acceptance"
IDLE_S, LOADED_S = 1.0, 2.0  # 95 % of publications
GROWTH = 0.05
Part = Callable[[World, Verdict, "Places"], None]


class Places:
    """Where the run's things are, and which process group the engine is."""

    def __init__(self, scratch: Path, model: Path, engine_group: int) -> None:
        self.scratch, self.model, self.engine_group = scratch, model, engine_group


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.registry", description=__doc__)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="default: all, in order")
    parser.add_argument("--keep", action="store_true", help="keep logs and data")
    arguments = parser.parse_args()
    chosen: list[str] = arguments.only or list(PARTS)
    scratch = Path(tempfile.mkdtemp(prefix="loopline-registry-"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tiny = [name for name in chosen if name not in ON_SMOLLM]
    small = [name for name in chosen if name in ON_SMOLLM]
    passed = not tiny or _measure(tiny, tiny_spec(cached_tiny_model()), scratch)
    passed = (not small or _measure(small, smollm_spec(smollm_directory()), scratch)) and passed
    if passed and not arguments.keep:
        shutil.rmtree(scratch)
    return 0 if passed else 1


def _measure(parts: Sequence[str], spec: EngineSpec, scratch: Path) -> bool:
    """Measure on one engine; return whether every bar is held."""
    console, passed = Console(), True
    with running_engine(launch_vllm(spec), spec.url, scratch / f"{spec.served_name}.log") as engine:
        endpoint = endpoint_of(spec, vocab_size=vocab_size_of(spec.model_path))
        places = Places(scratch, spec.model_path, engine.pid)
        for name in parts:
            verdict = Verdict(title=f"registry: {name}", command=f"{COMMAND} ONLY={name}")
            with running_stack(endpoint, scratch / name) as stack, world_of(stack) as world:
                PARTS[name](world, verdict, places)
            show(console, verdict)
            passed = passed and verdict.passed
    return passed


def measure_growth(world: World, verdict: Verdict, places: Places) -> None:
    found = growth.run(world, engine_group=places.engine_group, publications=300, settled=50)
    for name, share in found.last.growth(found.first).items():
        before, after = getattr(found.first, name), getattr(found.last, name)
        verdict.line(f"{name}: 50th to 300th publication", f"{before:,} to {after:,} ({share:+.1%})", f"< {GROWTH:.0%}")
        verdict.require(share < GROWTH, f"{name} grew by {share:.1%}")
    publish_within(verdict, found.published, "idle", IDLE_S)


def measure_crowd(world: World, verdict: Verdict, places: Places) -> None:
    quiet = crowd.teach(world, 16)
    mixed = crowd.control(world, quiet)
    verdict.line("distinct quiet answers", len({answer.tokens for answer in quiet}), "16")
    verdict.line("wrong in the mixed-batch control", len(mixed), "0")
    seen = crowd.run(world, quiet, requests=400, publications=40)
    verdict.line("smallest margin of a token (nats)", f"{seen.smallest_margin:.2f}", ">= 2")
    verdict.line("requests, publications meanwhile", f"{seen.asked}, {len(seen.published)}", "400, 40")
    verdict.line("wrong answers", len(seen.wrong), "0")
    for wrong in (*mixed, *seen.wrong):
        verdict.require(False, wrong)
    verdict.require(len(seen.published) == 40, f"{len(seen.published)} publications")
    publish_within(verdict, seen.published, "under load", LOADED_S)


def publish_within(verdict: Verdict, published: Sequence[Publication], when: str, bar_s: float) -> None:
    for phase in fields(Publication):
        seconds = [getattr(one, phase.name) for one in published]
        median, p95 = percentile(seconds, 0.5), percentile(seconds, 0.95)
        whole = phase.name == "total_s"
        line = f"publish, {when}" if whole else f"  of which {phase.name.removesuffix('_s')}"
        verdict.line(f"{line}: median, p95", f"{median:.3f} s, {p95:.3f} s", f"< {bar_s:g} s" if whole else "")
        if whole:
            verdict.require(p95 < bar_s, f"publish p95 {when} {p95:.2f} s")


def measure_prefixes(world: World, verdict: Verdict, places: Places) -> None:
    found = prefixes.versions(world, 10, group="prefixes")
    adapters: dict[str, Path] = {}
    for number, (version, _, _) in enumerate(found):
        adapters[f"v{number}"] = places.scratch / f"prefix-{number}"
        travels.downloaded(world, version, adapters[f"v{number}"])
    log = places.scratch / "cold.log"
    with prefixes.cold_engine(adapters, base=places.model, rank=8, log=log) as url:
        cold = [travels.by_vllm(url, name, prefixes.TOKENS) for name in adapters]
    gaps = [worst(engines, alone) for (_, engines, _), alone in zip(found, cold, strict=True)]
    steps = [mean(after[1], before[1]) for after, before in zip(found[1:], found, strict=False)]
    trainers = [worst(engines, theirs) for _, engines, theirs in found]
    verdict.line("largest difference from a cold engine (nats)", f"{max(gaps):.2e}", "< 1e-4")
    verdict.line("largest difference from the trainer (nats)", f"{max(trainers):.2e}", "< 1e-3")
    verdict.line("smallest mean difference between neighbours (nats)", f"{min(steps):.3f}", "> 0.01")
    verdict.require(max(gaps) < 1e-4, f"a version differs from a cold engine by {max(gaps):.2e}")
    verdict.require(max(trainers) < 1e-3, f"a version differs from the trainer by {max(trainers):.2e}")
    verdict.require(min(steps) > 0.01, "neighbours do not differ")


def measure_travels(world: World, verdict: Verdict, places: Places) -> None:
    _travel(world, verdict, places, travels.tiny(places.model))


def measure_travels_in_bfloat16(world: World, verdict: Verdict, places: Places) -> None:
    _travel(world, verdict, places, travels.smollm(places.model))


def _travel(world: World, verdict: Verdict, places: Places, subject: travels.Subject) -> None:
    for unembed in (False, True):
        name = "with lm_head" if unembed else "projections"
        session = travels.trained(world, subject, unembed=unembed, group=f"travels-{int(unembed)}")
        trainers, version = travels.trainers_scores(world, session, subject), world.save(session)
        merged = world.save(session, merge_weights=True)
        here = places.scratch / f"{subject.dtype}-{unembed}"
        adapter, whole = here / "adapter", here / "merged"
        travels.downloaded(world, version, adapter)
        travels.downloaded(world, merged, whole)
        unpacked = travels.archived(world, version, here / "archive")
        same = all((unpacked / path.name).read_bytes() == path.read_bytes() for path in adapter.iterdir())
        verdict.require(same, f"{name}: the archive differs from the files")
        with travels.service_of(world) as service:
            back = service.versions.import_("guests", adapter, base_model=world.stack.base_model).version
        ways = {
            "export -> PEFT": travels.by_peft(subject, adapter),
            "merge -> transformers": travels.by_transformers(subject, whole),
            "export -> import -> score": world.scores(back, subject.tokens),
        }
        for kind, served in (("adapter", version), ("merged", merged)):
            with travels.served(world, served, directory=here / f"served-{kind}", log=here / f"{kind}.log") as url:
                ways[f"loopline serve --run, {kind}"] = travels.by_vllm(url, served, subject.tokens)
        for way, scores in ways.items():
            found = mean(scores, trainers)
            verdict.line(f"{way}, {name}: mean (nats)", f"{found:.2e}", f"< {subject.mean:g}")
            verdict.require(found < subject.mean, f"{way}, {name}: mean {found:.2e}")


PARTS: dict[str, Part] = {
    "travels": measure_travels,
    "bfloat16": measure_travels_in_bfloat16,
    "prefixes": measure_prefixes,
    "crowd": measure_crowd,
    "growth": measure_growth,
}
ON_SMOLLM = frozenset({"bfloat16"})  # the others are measured on the tiny model in float32


if __name__ == "__main__":
    sys.exit(main())
