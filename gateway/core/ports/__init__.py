"""What the core needs from the world. ``store`` and ``engines`` implement these; tests use shipped fakes.

A ``UnitOfWork`` is one transaction: everything done through its stores commits together or not at all, and is
durable when ``Database.write`` has been left. No unit is held while waiting for an engine, a trainer or a client.
"""

from gateway.core.ports.audit import AuditStore
from gateway.core.ports.clients import ClientStore
from gateway.core.ports.content import Artifacts, BlobStore, CorruptArtifact
from gateway.core.ports.database import Database, UnitOfWork, Wakeups
from gateway.core.ports.grammars import Constraint, Grammars
from gateway.core.ports.ledger import Ledger
from gateway.core.ports.limits import LimitStore, OwnLimit
from gateway.core.ports.registry import Registry, Upkeep, VersionStore
from gateway.core.ports.scores import ScoreStore, ScoreWork, ScoreWorkStore
from gateway.core.ports.serving import EngineHealth, EngineMetrics, Engines, Prices, Probe, Probes
from gateway.core.ports.stores import (
    KeyStore,
    LockStore,
    OperationStore,
    RunningSample,
    SampleStore,
    SessionStore,
    StoredSample,
    UsageStore,
)
from gateway.core.ports.work import Lease, StaleLease, Work, WorkStore

__all__ = [
    "Artifacts",
    "AuditStore",
    "BlobStore",
    "ClientStore",
    "Constraint",
    "CorruptArtifact",
    "Database",
    "EngineHealth",
    "EngineMetrics",
    "Engines",
    "Grammars",
    "KeyStore",
    "Lease",
    "Ledger",
    "LimitStore",
    "LockStore",
    "OperationStore",
    "OwnLimit",
    "Prices",
    "Probe",
    "Probes",
    "Registry",
    "RunningSample",
    "SampleStore",
    "ScoreStore",
    "ScoreWork",
    "ScoreWorkStore",
    "SessionStore",
    "StaleLease",
    "StoredSample",
    "UnitOfWork",
    "Upkeep",
    "UsageStore",
    "VersionStore",
    "Wakeups",
    "Work",
    "WorkStore",
]
