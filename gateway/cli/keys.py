"""`loopline keys`: API keys, directly in the database."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, NoReturn

import typer

from gateway.auth.keys import DEFAULT_PROJECT, KEY_TEXT, mint
from gateway.auth.keys import rotate as rotated
from gateway.auth.master import MasterKeyError, open_keyring
from gateway.cli.common import AsJson, DataDir, ago, fail, note, open_store, out, print_json, print_table, settings_of
from gateway.core.clock import SystemClock
from gateway.core.errors import Conflict, NotFound
from gateway.core.ids import KeyId, ProjectId
from gateway.core.ports import UnitOfWork
from gateway.core.principals import ALL_SCOPES, Key, Scope
from gateway.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Make, list, rotate and revoke API keys.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    project: Annotated[str, typer.Option(help="Whose objects it sees; made if it is new.")] = DEFAULT_PROJECT,
    scope: Annotated[list[Scope] | None, typer.Option(help="What it may do; all when not given.")] = None,
    expires_in_days: Annotated[float | None, typer.Option(min=0, help="When it ends; never when not given.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and show it, this once: only its id is kept."""
    scopes = frozenset(scope) if scope else ALL_SCOPES
    if Scope.READ_ONLY in scopes and len(scopes) > 1:
        fail("a key that is read-only can have no other scope")
    lifetime = timedelta(days=expires_in_days) if expires_in_days is not None else None
    try:
        key, text = asyncio.run(_create(settings_of(data_dir), name, project, scopes, lifetime))
    except MasterKeyError as error:
        fail(str(error))
    if as_json:
        print_json({**_facts(key), "key": text})
        return
    out().print(text, soft_wrap=True, highlight=False)
    note().print(f"Key {key.id} ({name}) of project {project}. It is not shown again.", soft_wrap=True)


@app.command("list")
def list_keys(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List all keys; secrets are not among what is shown, since they are not kept."""
    keys, projects = asyncio.run(_all(settings_of(data_dir)))
    if as_json:
        print_json([{**_facts(key), "project": projects[key.project_id]} for key in keys])
        return
    now = SystemClock().now()
    rows = [
        (
            key.id,
            key.name,
            " ".join(sorted(key.scopes)),
            ago(key.created_at),
            _standing(key, now),
            projects[key.project_id],
        )
        for key in keys
    ]
    print_table(["id", "name", "scopes", "created", "standing", "project"], rows, empty="No keys yet.")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The id of the key, or the key itself.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key, at once and for good."""
    key_id = _id_of(key)
    try:
        revoked = asyncio.run(_revoke(settings_of(data_dir), key_id))
    except NotFound:
        _no_key(key_id)
    if as_json:
        print_json(_facts(revoked))
        return
    out().print(f"Key {revoked.id} ({revoked.name}) is revoked.", highlight=False)


@app.command()
def rotate(
    key: Annotated[str, typer.Argument(help="The id of the key, or the key itself.")],
    grace_hours: Annotated[float, typer.Option(min=0, help="How long the old key goes on working.")] = 0.0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a key that replaces another: same project, name, scopes and end. It is shown this once."""
    key_id = _id_of(key)
    try:
        successor, text = asyncio.run(_rotate(settings_of(data_dir), key_id, timedelta(hours=grace_hours)))
    except (MasterKeyError, Conflict) as error:
        fail(str(error))
    except NotFound:
        _no_key(key_id)
    if as_json:
        print_json({**_facts(successor), "key": text})
        return
    out().print(text, soft_wrap=True, highlight=False)
    until = f"works for {grace_hours:g} more hours" if grace_hours else "is revoked"
    note().print(f"Key {successor.id} replaces {key_id}, which {until}. It is not shown again.", soft_wrap=True)


async def _create(
    settings: Settings, name: str, project: str, scopes: frozenset[Scope], lifetime: timedelta | None
) -> tuple[Key, str]:
    now = SystemClock().now()
    keyring = open_keyring(settings)
    async with open_store(settings) as database, database.write() as unit:
        key, text = await mint(
            unit,
            keyring,
            project_id=await unit.keys.ensure_project(project),
            name=name,
            scopes=scopes,
            at=now,
            expires_at=now + lifetime if lifetime is not None else None,
        )
        await _note(unit, key, "keys create")
        return key, text


async def _rotate(settings: Settings, key_id: KeyId, grace: timedelta) -> tuple[Key, str]:
    keyring = open_keyring(settings)
    async with open_store(settings) as database, database.write() as unit:
        key, text = await rotated(unit, keyring, key_id, at=SystemClock().now(), grace=grace)
        await _note(unit, key, "keys rotate", replaces=key_id)
        return key, text


async def _all(settings: Settings) -> tuple[Sequence[Key], Mapping[ProjectId, str]]:
    async with open_store(settings) as database, database.read() as unit:
        return await unit.keys.all(), await unit.keys.projects()


async def _revoke(settings: Settings, key_id: KeyId) -> Key:
    async with open_store(settings) as database, database.write() as unit:
        key = await unit.keys.revoke(key_id, SystemClock().now())
        await _note(unit, key, "keys revoke")
        return key


async def _note(unit: UnitOfWork, key: Key, action: str, **more: str) -> None:
    subject = ", ".join(f"{name}={value}" for name, value in {"key": key.id, "name": key.name, **more}.items())
    await unit.audit.add(key.project_id, actor=None, action=action, subject=subject)


def _id_of(key: str) -> KeyId:
    match = KEY_TEXT.fullmatch(key)
    return KeyId(match[1] if match else key)


def _no_key(key_id: KeyId) -> NoReturn:
    fail(f"no key has the id {key_id}; `loopline keys list` shows them")


def _standing(key: Key, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None:
        return "expired" if key.expires_at <= now else f"until {key.expires_at:%Y-%m-%d %H:%M} UTC"
    return "valid"


def _facts(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "project_id": key.project_id,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at.isoformat(),
        "expires_at": key.expires_at.isoformat() if key.expires_at else None,
        "revoked_at": key.revoked_at.isoformat() if key.revoked_at else None,
    }
