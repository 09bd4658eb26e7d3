"""`loopline versions`: the registry, asked of the gateway. An ADDRESS is any spelling of a version."""

import tarfile
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.cli.common import ApiKey, AsJson, BaseUrl, DataDir, ago, fail, out, print_json, print_table, settings_of
from gateway.cli.http import Gateway, find_gateway
from gateway.core.adapter_files import CONFIG_NAME, WEIGHTS_NAME

app = typer.Typer(no_args_is_help=True, help="List, name, delete, verify, export and import versions.")

Address = Annotated[str, typer.Argument(help="group@3, group@alias, group@latest, tinker://..., an ARN or an id.")]
_PAGE = 100
_VERIFY_TIMEOUT_S = 600.0


@app.command("list")
def list_versions(
    group: Annotated[str | None, typer.Argument(help="Of one group; all when not given.")] = None,
    kind: Annotated[str | None, typer.Option(help="adapter, merged or state.")] = None,
    state: Annotated[str | None, typer.Option(help="staged, published or rejected.")] = None,
    tag: Annotated[str | None, typer.Option(help="With this tag.")] = None,
    session: Annotated[str | None, typer.Option(help="Saved by this session (its id).")] = None,
    deleted: Annotated[bool, typer.Option("--deleted", help="Also deleted and expired ones.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List versions, newest first."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    wanted = {"kind": kind, "state": state, "tag": tag, "session_id": session, "deleted": deleted or None}
    path = "/versions" if group is None else f"/model_packages/{quote(group, safe='')}"
    found = list(islice(_pages(gateway, path, wanted), limit))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            version["address"],
            version["kind"],
            _standing(version),
            " ".join(version["aliases"]),
            version["name"] or "",
            str(version["optimizer_step"]),
            f"{version['size_bytes']:,}",
            ago(version["created_at"]),
        )
        for version in found
    ]
    columns = ["version", "kind", "state", "aliases", "name", "step", "bytes", "saved"]
    print_table(columns, rows, empty="No versions.", right=["step", "bytes"])


@app.command()
def show(
    address: Address,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show one version: lineage, labels, and what the publish gate measured."""
    version = find(find_gateway(settings_of(data_dir), base_url, api_key), address)
    if as_json:
        print_json(version)
        return
    canary = version["canary"]
    facts = {
        "version": version["address"],
        "id": version["id"],
        "kind, state": f"{version['kind']}, {_standing(version)}",
        "fingerprint": version["fingerprint"],
        "base model": version["base_model"],
        "lora": ", ".join(f"{name} {value}" for name, value in version["lora"].items()),
        "session, seq, step": f"{version['session_id']}, {version['seq']}, {version['optimizer_step']}",
        "aliases": " ".join(version["aliases"]),
        "name, tags": " ".join([version["name"] or "", *version["tags"]]).strip(),
        "description": version["description"],
        "bytes": f"{version['size_bytes']:,}",
        "saved": version["created_at"],
        "expires": version["expires_at"] or "never",
        "gate": ""
        if canary is None
        else f"mean {canary['mean_difference']:.2e}, max {canary['max_difference']:.2e} nats"
        + (", inconclusive" if canary["inconclusive"] else ""),
    }
    print_table(["fact", "value"], [(name, value) for name, value in facts.items() if value], empty="")
    _print_checks(version["checks"])


@app.command()
def alias(
    address: Address,
    name: Annotated[str, typer.Argument(help="The alias, such as champion.")],
    drop: Annotated[bool, typer.Option("--drop", help="Take it away instead; the version stays.")] = False,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Let an alias name a version, and no other of its group from now on."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    version = find(gateway, address)
    path = f"/model_packages/{version['group']}/aliases/{quote(name, safe='')}"
    if drop:
        gateway.delete(path)
        out().print(f"{version['group']}@{name} names nothing any more.", highlight=False)
        return
    version = gateway.put(path, {"version": version["number"]})
    out().print(f"{version['group']}@{name} is {version['address']}.", highlight=False)


@app.command()
def delete(
    address: Address,
    force: Annotated[bool, typer.Option("--force", help="Also the only copy, or what a live session uses.")] = False,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Delete a version: what runs on it finishes, new requests are refused."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    version = gateway.delete(place(find(gateway, address)), force=force)
    out().print(f"{version['address']} is deleted; `loopline versions undelete` brings it back.", highlight=False)


@app.command()
def undelete(address: Address, data_dir: DataDir = None, base_url: BaseUrl = None, api_key: ApiKey = None) -> None:
    """Bring a deleted or expired version back."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    version = gateway.post(f"{place(find(gateway, address))}/undelete")
    out().print(f"{version['address']} is back.", highlight=False)


@app.command()
def verify(
    address: Address,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Take a published adapter through the publish gate again, on every engine; exit status 1 when it fails."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    answer = gateway.post(f"{place(find(gateway, address))}/verify", timeout_s=_VERIFY_TIMEOUT_S)
    if as_json:
        print_json(answer)
    else:
        _print_checks(answer["checks"])
    if not answer["passed"]:
        fail(f"{answer['version']} did not pass the publish gate")


@app.command("export")
def export_version(
    address: Address,
    directory: Annotated[Path, typer.Argument(help="Where the files go; made if it is new.")],
    archive: Annotated[bool, typer.Option("--archive", help="As one tar instead of single files.")] = False,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Download an adapter (a PEFT directory) or a merged model; one that was cut goes on where it ended."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    for path in fetch(gateway, find(gateway, address), directory, archive=archive):
        out().print(str(path), soft_wrap=True, highlight=False)


@app.command("import")
def import_adapter(
    group: Annotated[str, typer.Argument(help="The model package group that it becomes a version of.")],
    adapter: Annotated[Path, typer.Argument(help="A PEFT directory, or a tar of one.", exists=True)],
    base_model: Annotated[str, typer.Option(help="The base model that it was trained on, by catalogue name.")],
    name: Annotated[str | None, typer.Option(help="What the version is called.")] = None,
    description: Annotated[str | None, typer.Option(help="In your words.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Make a version of a PEFT adapter; returns when it passed the publish gate."""
    gateway = find_gateway(settings_of(data_dir), base_url, api_key)
    labels = {"name": name, "description": description, "tags": tag or None}
    with tempfile.TemporaryDirectory() as folder:
        packed = _packed(adapter, Path(folder) / "adapter.tar")
        path = f"/model_packages/{quote(group, safe='')}/import"
        operation = gateway.upload(path, packed, "application/x-tar", base_model=base_model, **labels)
    while operation["status"] in ("queued", "running"):
        operation = gateway.get(f"/operations/{operation['id']}", wait=20)
    if operation["result"] is None:
        fail((operation["error"] or {"message": f"the import was {operation['status']}"})["message"])
    if as_json:
        print_json(operation["result"])
        return
    out().print(f"{operation['result']['version']} is published.", highlight=False)


def find(gateway: Gateway, address: str) -> dict[str, Any]:
    """Return the version, or end the program."""
    return gateway.get(f"/versions/{quote(address, safe='')}")


def place(version: dict[str, Any]) -> str:
    """Return the version's own path."""
    return f"/model_packages/{version['group']}/{version['number']}"


def fetch(gateway: Gateway, version: dict[str, Any], directory: Path, *, archive: bool = False) -> list[Path]:
    """Download a version's files into ``directory``, those that are not there yet."""
    links = gateway.get(f"{place(version)}/export")
    paths: list[Path] = []
    for file in [links["archive"]] if archive else links["files"]:
        target = directory / file["name"]
        if not target.exists():
            gateway.download(file["url"], target, size_bytes=file["size_bytes"], sha256=file["sha256"])
        paths.append(target)
    return paths


def _pages(gateway: Gateway, path: str, wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    after: str | None = None
    while True:
        page = gateway.get(path, limit=_PAGE, after=after, **wanted)
        yield from page["data"]
        after = page["next"]
        if after is None:
            return


def _standing(version: dict[str, Any]) -> str:
    return "deleted" if version["deleted_at"] else version["state"]


def _print_checks(checks: list[dict[str, Any]]) -> None:
    rows = [
        (
            check["engine"],
            "passed" if check["passed"] else "failed",
            check["occasion"],
            ago(check["at"]),
            check["failure"]
            or f"mean {check['report']['mean_difference']:.2e}, max {check['report']['max_difference']:.2e}",
        )
        for check in checks
    ]
    if rows:
        print_table(["engine", "verdict", "why", "when", "measured (nats)"], rows, empty="")


def _packed(adapter: Path, target: Path) -> Path:
    if not adapter.is_dir():
        return adapter
    with tarfile.open(target, mode="w") as archive:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (adapter / name).is_file():
                fail(f"{adapter} has no {name}: is it a PEFT directory with safetensors?")
            archive.add(adapter / name, name)
    return target
