"""What a run does, drawn from a seed: operations per session, samples, and when which fault strikes. Pure.

A plan is complete: every operation's body, whether it must complete, with which code it must fail, and what it costs
are known beforehand. So one run's outcome can be held against another's, and against a reference that never saw it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

LORA = {"rank": 4, "alpha": 8.0, "train_attn": True, "train_mlp": True, "train_unembed": False}
TINKER_LORA = {"rank": 8, "alpha": 32.0}  # that dialect's alpha is 32, whatever the rank
PROBE_LENGTH = 24
# Above what float32 rounding does to a gradient's entries (1e-4 in a LONG pass). AdamW's first step moves an entry
# far above eps by the whole rate, whatever its size: one that is nothing but rounding would be a coin's throw.
ADAM_EPS = 1e-2
_OVERFLOW = -1e30  # a sampler log-probability that makes the ratio infinite


class Fault(StrEnum):
    """What is done to a running stack."""

    KILL_TRAINER = "kill trainer"
    KILL_GATEWAY = "kill gateway"
    KILL_ENGINE = "kill engine"
    KILL_ALL = "kill everything"
    TERM_TRAINER = "term trainer"
    TERM_GATEWAY = "term gateway"
    RESTART_DATABASE = "restart database"
    FSYNC_ERROR_GATEWAY = "fsync EIO in gateway"
    FSYNC_ERROR_TRAINER = "fsync EIO in trainer"
    WRITE_ERROR_GATEWAY = "write EIO in gateway"
    WRITE_ERROR_TRAINER = "write EIO in trainer"
    NO_SPACE_GATEWAY = "ENOSPC in gateway"
    NO_SPACE_TRAINER = "ENOSPC in trainer"
    FSYNC_ERROR_DATABASE = "fsync EIO in database"
    NO_SPACE_DATABASE = "ENOSPC in database"
    FULL_DISK = "full disk"


class Style(StrEnum):
    """What a session's operations are like."""

    MIXED = "mixed"
    LONG = "long"  # every pass takes some 0.1 s on the tiny model: it can be interrupted inside
    SAVES = "saves"  # every third operation is a save
    FRAIL = "frail"  # saves may fail for want of space or a broken disk, so nothing depends on them but the last


class Dialect(StrEnum):
    """Which client a session's operations come from."""

    NATIVE = "native"
    SAGEMAKER = "sagemaker"
    TINKER = "tinker"

    @property
    def first_seq(self) -> int:
        """The seq of a session's first operation; a Tinker model's creation counts as one."""
        return 2 if self is Dialect.TINKER else 1


DIALECTS = (Dialect.NATIVE, Dialect.SAGEMAKER, Dialect.TINKER, Dialect.SAGEMAKER)  # of a run's sessions, in turn

# 100 trainer, 60 gateway, 20 engine, 20 everything of 200.
KILLS = {Fault.KILL_TRAINER: 5, Fault.KILL_GATEWAY: 3, Fault.KILL_ENGINE: 1, Fault.KILL_ALL: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation. ``needs`` is a seq that must be final before this one can be submitted (0: none).

    ``failure`` is the code it must fail with (None: it must complete); ``tokens`` what it must be billed for then. One
    that is ``frail`` may also fail for want of space; one in ``calm`` is sent when the last strike is over.
    """

    seq: int
    verb: str
    body: dict[str, Any]
    tokens: int = 0
    failure: str | None = None
    needs: int = 0
    frail: bool = False
    calm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampling call, of the version that the eager save at seq ``after`` made, or (0) of the base model."""

    key: str
    body: dict[str, Any]
    after: int
    version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """One session's life: numbered steps without a gap, and the samples drawn meanwhile.

    A step names a version as if the session's group were named like the session.
    """

    name: str
    dialect: Dialect
    lora: dict[str, Any]
    steps: tuple[Step, ...]
    samples: tuple[Sample, ...]

    @property
    def final_state(self) -> int:
        """The seq of the save_state that everything before it went into."""
        return next(step.seq for step in reversed(self.steps) if step.verb == "save_state")

    @property
    def probe(self) -> Step:
        """The last step: a forward whose log-probabilities judge the whole run."""
        return self.steps[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault, due ``delay_s`` after ``after`` operations of the run are final."""

    fault: Fault
    after: int
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run."""

    seed: int
    sessions: tuple[SessionPlan, ...]
    strikes: tuple[Strike, ...] = ()

    @property
    def operations(self) -> int:
        return sum(len(session.steps) for session in self.sessions)


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A session plan being drawn."""

    rng: random.Random
    vocab_size: int
    style: Style
    first_seq: int
    steps: list[Step] = field(default_factory=list[Step])
    states: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (seq, number in the group)
    eager: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # likewise
    saves: int = 0

    def add(self, verb: str, body: dict[str, Any], **facts: Any) -> int:
        seq = self.first_seq + len(self.steps)
        self.steps.append(Step(seq=seq, verb=verb, body=body, **facts))
        return seq

    def tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(3, self.vocab_size) for _ in range(length)]

    def batch(self, *, policy: bool, overflow: bool = False) -> list[dict[str, Any]]:
        count, longest = (16, 80) if self.style is Style.LONG else (self.rng.randint(1, 4), 40)
        rows = [self.datum(policy=policy, length=self.rng.randint(6, longest)) for _ in range(count)]
        if overflow:
            rows[-1]["loss_fn_inputs"]["logprobs"][-1] = _OVERFLOW
            rows[-1]["loss_fn_inputs"]["advantages"][-1] = 1.0
        return rows

    def datum(self, *, policy: bool, length: int) -> dict[str, Any]:
        tokens = self.tokens(length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if policy:
            inputs["logprobs"] = [round(self.rng.uniform(-7, -5), 3) for _ in range(length)]
            inputs["advantages"] = [round(self.rng.uniform(-1, 1), 3) for _ in range(length)]
        else:
            inputs["weights"] = [self.rng.choice([0.0, 1.0, 1.0, 0.5]) for _ in range(length)]
            inputs["weights"][-1] = 1.0
        return {"model_input": tokens[:-1], "loss_fn_inputs": inputs}

    def pass_over(self, verb: str, *, overflow: bool = False) -> None:
        policy = overflow or self.rng.random() < 0.4
        data = self.batch(policy=policy, overflow=overflow)
        body = {"data": data, "loss_fn": "importance_sampling" if policy else "cross_entropy"}
        if overflow:
            self.add(verb, body, failure="non_finite_loss")
        else:
            self.add(verb, body, tokens=sum(len(datum["model_input"]) for datum in data))

    def step(self, failure: str | None = None) -> None:
        adam = {
            "learning_rate": self.rng.choice([3e-4, 1e-3]),
            "eps": ADAM_EPS,
            "weight_decay": self.rng.choice([0.0, 0.01]),
            "grad_clip_norm": self.rng.choice([0.0, 1.0, 5.0]),
        }
        self.add("optim_step", {"adam_params": adam}, failure=failure)

    def window(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self.pass_over("forward_backward")
        self.step()

    def broken_window(self) -> None:
        """One pass of the window fails: the step must fail too, and clear the window."""
        self.pass_over("forward_backward")
        self.pass_over("forward_backward", overflow=True)
        self.step("incomplete_window")

    def save(self, verb: str, *, calm: bool = False, **body: Any) -> int:
        seq = self.add(verb, body, frail=self.style is Style.FRAIL, calm=calm)
        self.saves += 1
        return seq

    def save_state(self) -> None:
        self.states.append((self.save("save_state"), self.saves))

    def load_state(self, group: str) -> None:
        if not self.states:
            self.save_state()
        seq, number = self.rng.choice(self.states)
        self.add("load_state", {"version": f"{group}@{number}", "optimizer": self.rng.random() < 0.7}, needs=seq)

    def save_weights(self) -> None:
        if self.rng.random() < 0.7:
            seq = self.save("save_weights")
            if self.style is not Style.FRAIL:
                self.eager.append((seq, self.saves))
        else:
            self.save("save_weights", publish="lazy")

    def judge(self) -> None:
        """What a run is judged by: a state, an adapter, and a forward over the probe."""
        frail, self.style = self.style is Style.FRAIL, Style.MIXED
        self.save("save_state", calm=frail)
        self.save("save_weights", calm=frail, publish="lazy")
        probe = [self.datum(policy=False, length=PROBE_LENGTH) for _ in range(2)]
        self.add("forward", {"data": probe}, tokens=2 * PROBE_LENGTH, calm=frail)


def draw_session(
    rng: random.Random,
    name: str,
    operations: int,
    *,
    vocab_size: int,
    style: Style,
    dialect: Dialect = Dialect.NATIVE,
    samples: int = 2,
) -> SessionPlan:
    """Draw a session of about ``operations`` steps that ends with a state, an adapter and a probe."""
    draft = _Draft(rng=rng, vocab_size=vocab_size, style=style, first_seq=dialect.first_seq)
    while len(draft.steps) < operations - 3:
        if style is Style.SAVES:
            draft.save_state() if rng.random() < 0.5 else draft.save_weights()
        chance = rng.random()
        if chance < 0.60:
            draft.window()
        elif chance < 0.70:
            draft.pass_over("forward")
        elif chance < 0.82:
            draft.save_weights()
        elif chance < 0.88:
            draft.save_state()
        elif chance < 0.93 and style is not Style.FRAIL:
            draft.load_state(name)
        elif chance < 0.97:
            draft.broken_window()
        else:
            draft.step("empty_window") if not _window_open(draft.steps) else draft.window()
    draft.judge()
    own = TINKER_LORA if dialect is Dialect.TINKER else {}
    return SessionPlan(
        name=name,
        dialect=dialect,
        lora={**LORA, **own, "seed": rng.randrange(2**31)},
        steps=tuple(draft.steps),
        samples=tuple(_sample(rng, draft, name, f"{name}-sample-{index}") for index in range(samples)),
    )


def _window_open(steps: Sequence[Step]) -> bool:
    verbs = [step.verb for step in steps if step.verb in ("forward_backward", "optim_step", "load_state")]
    return bool(verbs) and verbs[-1] == "forward_backward"


def _sample(rng: random.Random, draft: _Draft, group: str, key: str) -> Sample:
    body = {
        "prompt": draft.tokens(rng.randint(3, 12)),
        "num_samples": rng.randint(1, 3),
        "max_tokens": rng.randint(4, 24),
        "seed": rng.randrange(2**31),
    }
    after, number = rng.choice([(0, 0), *draft.eager])
    return Sample(key=key, body=body, after=after, version=f"{group}@{number}" if after else None)


def draw_plan(
    seed: int,
    *,
    operations: int,
    sessions: int = 3,
    strikes: int = 0,
    faults: Sequence[Fault] = (),
    vocab_size: int,
    style: Style = Style.MIXED,
) -> Plan:
    """Draw a run of about ``operations`` operations over ``sessions`` sessions.

    ``faults`` are dealt in turn from shuffled packs, so that proportions hold in every long run; without any, packs
    are those of ``KILLS``.
    """
    rng = random.Random(seed)
    drawn = tuple(
        draw_session(
            random.Random(rng.randrange(2**63)),
            f"crash-{seed}-{index}",
            operations // sessions,
            vocab_size=vocab_size,
            style=style,
            dialect=DIALECTS[index % len(DIALECTS)],
        )
        for index in range(sessions)
    )
    plan = Plan(seed=seed, sessions=drawn)
    pack = list(faults) or [fault for fault, count in KILLS.items() for _ in range(count)]
    # A calm step waits for the last strike, which must not wait for it.
    tenths = 6 if style is Style.FRAIL else 9
    return Plan(seed=seed, sessions=drawn, strikes=draw_strikes(rng, pack, strikes, plan.operations * tenths // 10))


def draw_strikes(rng: random.Random, pack: Sequence[Fault], count: int, operations: int) -> tuple[Strike, ...]:
    """Spread ``count`` faults over ``operations``: each after a random number of them, at a random moment."""
    dealt: list[Fault] = []
    while len(dealt) < count:
        dealt += rng.sample(pack, len(pack))
    moments = sorted(rng.randrange(max(1, operations)) for _ in range(count))
    return tuple(
        Strike(fault=fault, after=after, delay_s=rng.uniform(0, 0.1))
        for fault, after in zip(dealt, moments, strict=False)
    )
