"""The engines' own counters against the facts of what they computed.

An engine counts a prompt once per sequence (``n`` samples count it ``n`` times) when the sequence's first token
comes, and every generated token. What is counted and not billed is a fact of the house. So while an engine lives, its
counters equal the sums of its facts, to the token, whenever it is quiet. A gateway that dies in the middle of a call
leaves tokens that nobody can attribute: as far as they fit into the calls that were open (``lost_calls``), they
become facts of the house, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite

from billing.accounts import HOUSE_PROJECT
from billing.database import is_postgres
from billing.facts import usage_source_facts
from billing.tables import engine_readings, lost_calls

PROMPT_METERS = ("prefill", "cached_prefill")
SAMPLE_METER = "sample"
LOST = "lost-"  # how the sources of lost calls' facts begin
# Kernels count from a whole second, so a process says that it began up to one too early, and facts of a predecessor
# that had just died would be taken for its own. No engine computes anything within its first second.
_EARLY_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What an engine says of itself. ``started_at`` is when its process had surely begun, in microseconds."""

    prompt_tokens: int
    generation_tokens: int
    unfinished: int
    started_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens by the two counters of an engine."""

    prompt: int
    generation: int

    def __sub__(self, other: "Tokens") -> "Tokens":
        return Tokens(prompt=self.prompt - other.prompt, generation=self.generation - other.generation)

    def within(self, other: "Tokens") -> bool:
        return 0 <= self.prompt <= other.prompt and 0 <= self.generation <= other.generation

    @property
    def none(self) -> bool:
        return self.prompt == 0 and self.generation == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one quiet engine: what its counters say more than the facts, and whether lost calls explain it."""

    surplus: Tokens
    explained: bool


_READ = ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:num_requests_", "process_start_time_seconds")


def parse_counters(text: str) -> Counters | None:
    """Read the Prometheus text of an engine; None when a counter is missing."""
    sums: dict[str, float] = {}
    ours = "\n".join(line for line in text.split("\n") if line.startswith(_READ))  # of hundreds of lines
    for family in text_string_to_metric_families(ours):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    try:
        return Counters(
            prompt_tokens=int(sums["vllm:prompt_tokens_total"]),
            generation_tokens=int(sums["vllm:generation_tokens_total"]),
            unfinished=int(sums["vllm:num_requests_running"] + sums["vllm:num_requests_waiting"]),
            started_at=int(sums["process_start_time_seconds"] * 1_000_000) + _EARLY_US,
        )
    except KeyError:
        return None


def counted(connection: Connection, engine: str, *, since: int, until: int | None = None) -> Tokens:
    """Return what the facts of ``engine`` say that its counters counted."""
    f = usage_source_facts.c
    query = (
        select(f.meter, func.sum(f.quantity).label("tokens"))
        .where((f.engine == engine) & (f.at >= since))
        .group_by(f.meter)
    )
    if until is not None:
        query = query.where(f.at <= until)
    sums = {row.meter: int(row.tokens or 0) for row in connection.execute(query)}
    return Tokens(prompt=sum(sums.get(meter, 0) for meter in PROMPT_METERS), generation=sums.get(SAMPLE_METER, 0))


def judge(connection: Connection, engine: str, base_model: str, counters: Counters) -> Verdict:
    """Compare a quiet engine with its facts."""
    said = Tokens(prompt=counters.prompt_tokens, generation=counters.generation_tokens)
    surplus = said - counted(connection, engine, since=counters.started_at)
    return Verdict(surplus=surplus, explained=surplus.within(_allowance(connection, engine, base_model, counters)))


def keep_reading(connection: Connection, engine: str, base_model: str, counters: Counters, *, at: int) -> None:
    """Remember that the engine's counters and its facts were equal at ``at``."""
    values = {
        "base_model": base_model,
        "prompt_tokens": counters.prompt_tokens,
        "generation_tokens": counters.generation_tokens,
        "read_at": at,
    }
    insert = (postgresql if is_postgres(connection) else sqlite).insert(engine_readings)
    connection.execute(
        insert.values(engine=engine, started_at=counters.started_at, **values).on_conflict_do_update(
            index_elements=[engine_readings.c.engine, engine_readings.c.started_at], set_=values
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """An engine's last quiet reading, and what its facts up to then add up to now."""

    engine: str
    started_at: int
    said: Tokens
    counted: Tokens


def readings(connection: Connection) -> Sequence[Reading]:
    """Return one for every process of every engine that was ever read."""
    rows = connection.execute(select(engine_readings)).mappings().all()
    return [
        Reading(
            engine=row["engine"],
            started_at=row["started_at"],
            said=Tokens(prompt=row["prompt_tokens"], generation=row["generation_tokens"]),
            counted=counted(connection, row["engine"], since=row["started_at"], until=row["read_at"]),
        )
        for row in rows
    ]


def _allowance(connection: Connection, engine: str, base_model: str, counters: Counters) -> Tokens:
    """What lost calls may have consumed since the engine started, less what was put down to them already."""
    lost = connection.execute(
        select(
            func.coalesce(func.sum(lost_calls.c.prompt_tokens), 0).label("prompt"),
            func.coalesce(func.sum(lost_calls.c.sample_tokens), 0).label("sample"),
        ).where((lost_calls.c.base_model == base_model) & (lost_calls.c.at >= counters.started_at))
    ).one()
    f = usage_source_facts.c
    settled = {
        row.meter: int(row.tokens)
        for row in connection.execute(
            select(f.meter, func.sum(f.quantity).label("tokens"))
            .where(
                (f.project_id == HOUSE_PROJECT)
                & f.source.startswith(LOST)
                & (f.base_model == base_model)
                & (f.at >= counters.started_at)
            )
            .group_by(f.meter)
        )
    }
    return Tokens(prompt=int(lost.prompt), generation=int(lost.sample)) - Tokens(
        prompt=settled.get("prefill", 0), generation=settled.get(SAMPLE_METER, 0)
    )
