"""The core's ports on SQL (SQLite and PostgreSQL), and its files on a local directory."""

from gateway.store.artifacts import LocalArtifacts
from gateway.store.database import SERVER_WAIT_S, SqlDatabase, open_database, parse_url
from gateway.store.schema import OtherSchema, check_schema
from gateway.store.unfit import UnfitDatabase, WeakDurability

__all__ = [
    "SERVER_WAIT_S",
    "LocalArtifacts",
    "OtherSchema",
    "SqlDatabase",
    "UnfitDatabase",
    "WeakDurability",
    "check_schema",
    "open_database",
    "parse_url",
]
