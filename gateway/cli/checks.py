"""The checks of `loopline doctor`. Each looks at one thing and never changes it."""

import enum
import os
import platform
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from gateway.core.errors import GatewayError
from gateway.engines.cpu_plugin import plugin_status
from gateway.settings import Settings
from gateway.store import OtherSchema, UnfitDatabase, WeakDurability, open_database
from gateway.supervisor.machine import installed_version
from gateway.supervisor.ports import PortTaken, require_free
from gateway.supervisor.records import RunDir

_PYTHON = (3, 11)
_GIB = 1024**3
_DISK_WRONG_GIB = 1.0
_DISK_WARNING_GIB = 5.0
_MASTER_KEY_MODE = 0o600

_TRAINER_PACKAGES = ("torch", "transformers", "peft", "safetensors")


class Verdict(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but not everything
    WRONG = "wrong"  # something will not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was looked at, what was found, and what to do about it (empty when there is nothing to do)."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


async def run_checks(settings: Settings) -> list[Check]:
    """Run all checks, quick ones first."""
    return [
        check_python(),
        check_packages(),
        check_engine(),
        check_disk(settings.data_dir),
        check_port(settings),
        check_master_key(settings),
        await check_database(settings),
    ]


def check_python() -> Check:
    found = platform.python_version()
    if sys.version_info < _PYTHON:
        return Check(
            name="python", verdict=Verdict.WRONG, found=found, advice="install Python 3.11 or newer, then `make setup`"
        )
    return Check(name="python", verdict=Verdict.OK, found=found)


def check_packages() -> Check:
    """The gateway's packages are there, or this would not run; the trainer's may be missing."""
    versions = {name: installed_version(name) for name in _TRAINER_PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check(
            name="packages",
            verdict=Verdict.WRONG,
            found=f"missing: {', '.join(missing)}",
            advice="run `make setup`, or `pip install 'loopline-server[gpu]'` on a CUDA machine",
        )
    return Check(
        name="packages", verdict=Verdict.OK, found=", ".join(f"{name} {version}" for name, version in versions.items())
    )


def check_engine() -> Check:
    """vLLM is there, and on the CPU build the plugin without which mixed batches are answered wrongly."""
    status = plugin_status()
    if status.vllm_version is None:
        return Check(
            name="engine",
            verdict=Verdict.WRONG,
            found=status.reason,
            advice="run `make setup` (CPU), or `pip install 'loopline-server[gpu]'` on a CUDA machine",
        )
    found = f"vLLM {status.vllm_version}"
    if status.needed and not status.active:
        return Check(
            name="engine",
            verdict=Verdict.WRONG,
            found=f"{found} for CPU without Loopline's plugin: {status.reason}",
            advice="run `make setup`; base and LoRA requests in one batch would be answered wrongly",
        )
    plugin = "CPU plugin active" if status.active else "CUDA build, needs no plugin"
    return Check(name="engine", verdict=Verdict.OK, found=f"{found}, {plugin}")


def check_disk(data_dir: Path) -> Check:
    """Models, artefacts and logs go to the data directory's disk."""
    place = next(parent for parent in (data_dir.absolute(), *data_dir.absolute().parents) if parent.exists())
    free_gib = shutil.disk_usage(place).free / _GIB
    found = f"{free_gib:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Check(
            name="disk", verdict=Verdict.WRONG, found=f"{place} is not writable", advice="choose another --data-dir"
        )
    if free_gib < _DISK_WARNING_GIB:
        verdict = Verdict.WRONG if free_gib < _DISK_WRONG_GIB else Verdict.WARNING
        return Check(
            name="disk",
            verdict=verdict,
            found=found,
            advice=f"make room ({_DISK_WARNING_GIB:.0f} GiB are comfortable), or choose another --data-dir",
        )
    return Check(name="disk", verdict=Verdict.OK, found=found)


def check_port(settings: Settings) -> Check:
    """The gateway's port is free, or our own gateway has it."""
    where = f"{settings.host}:{settings.port}"
    address = RunDir(settings.data_dir).address() if (settings.data_dir / "run").is_dir() else None
    if address is not None and address.url.endswith(f":{settings.port}"):
        return Check(name="port", verdict=Verdict.OK, found=f"{where} is this data directory's running gateway")
    try:
        require_free(settings.host, settings.port)
    except PortTaken as error:
        problem, _, advice = str(error).partition("\n")
        return Check(name="port", verdict=Verdict.WRONG, found=problem, advice=advice)
    return Check(name="port", verdict=Verdict.OK, found=f"{where} is free")


def check_master_key(settings: Settings) -> Check:
    """Whoever reads the master key can make every API key."""
    if settings.master_key is not None:
        return Check(name="master key", verdict=Verdict.OK, found="injected as LOOPLINE_MASTER_KEY")
    path = settings.resolved_master_key_file
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return Check(name="master key", verdict=Verdict.OK, found="none yet; the first start makes it")
    if mode & ~_MASTER_KEY_MODE:
        return Check(
            name="master key",
            verdict=Verdict.WRONG,
            found=f"{path} has mode {mode:04o}: others can read it",
            advice=f"run: chmod 600 {path}",
        )
    return Check(name="master key", verdict=Verdict.OK, found=f"{path}, mode {mode:04o}")


async def check_database(settings: Settings) -> Check:
    """The database answers and its schema is the one this version knows."""
    if settings.database_url is None and not (settings.data_dir / "loopline.db").exists():
        return Check(name="database", verdict=Verdict.OK, found="none yet; the first start makes it (SQLite)")
    url = settings.resolved_database_url
    shown = make_url(url).render_as_string(hide_password=True)
    try:
        weakness = await _weakness(url, settings.blob_dir)
    except OtherSchema as error:
        return Check(name="database", verdict=Verdict.WRONG, found=f"{shown} cannot be used", advice=str(error))
    except (SQLAlchemyError, GatewayError, UnfitDatabase, ValueError) as error:
        problem = str(error).strip().splitlines()[0]
        return Check(
            name="database",
            verdict=Verdict.WRONG,
            found=f"{shown}: {problem}",
            advice="check that the server runs and that LOOPLINE_DATABASE_URL is right",
        )
    if weakness:
        return Check(
            name="database",
            verdict=Verdict.WARNING if settings.allow_weak_durability else Verdict.WRONG,
            found=f"{shown} may lose acknowledged work when the power fails",
            advice=weakness,
        )
    return Check(name="database", verdict=Verdict.OK, found=f"{shown}, schema up to date")


async def _weakness(url: str, blob_dir: Path) -> str:
    """Open the database; return what it may lose, and empty text when that is nothing."""
    try:
        async with open_database(url, blob_dir=blob_dir):
            return ""
    except WeakDurability as error:
        async with open_database(url, blob_dir=blob_dir, allow_weak_durability=True):
            return str(error)
