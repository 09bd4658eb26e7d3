"""The core's ports on SQL (SQLite and PostgreSQL), and its files on a local directory."""

from gateway.store.artifacts import LocalArtifacts
from gateway.store.database import SqlDatabase, open_database
from gateway.store.durability import WeakDurability

__all__ = ["LocalArtifacts", "SqlDatabase", "WeakDurability", "open_database"]
