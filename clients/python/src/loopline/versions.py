"""The registry of versions: look at them, name them, delete and bring back, judge again, take away and bring in.

A version is addressed in any of its spellings: ``group@3``, ``group@champion``, ``group@latest``, ``tinker://...``, an
ARN, or its id.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from loopline._connection import Connection
from loopline._submitter import Operation, Submitter
from loopline._transfer import Exported, archive_of, download
from loopline._transport import Transport, encode, parse, segment
from loopline.results import ModelPackage, SaveWeightsResponse, Verification

TAR = "application/x-tar"


class Versions:
    """What ``ServiceClient.versions`` is. Every call waits for its answer; each has an ``_async`` twin."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _transport(self) -> Transport:
        return self._connection.transport

    def _run(self, work: Any) -> Any:
        return self._connection.loop.run(work)

    def list(
        self,
        group: str | None = None,
        *,
        kind: str | None = None,
        state: str | None = None,
        tag: str | None = None,
        session_id: str | None = None,
        deleted: bool = False,
        max_results: int | None = 50,
    ) -> Sequence[ModelPackage]:
        """Return versions, newest first, of one group or all; ``max_results`` None means every one."""
        return self._run(
            self._list(
                group, max_results, kind=kind, state=state, tag=tag, session_id=session_id, deleted=deleted or None
            )
        )

    def show(self, address: str) -> ModelPackage:
        """Return one version, with what the publish gate measured.

        Raises:
            NotFound: there is none.
        """
        return self._run(self._show(address, "show"))

    def alias(self, address: str, alias: str) -> ModelPackage:
        """Let ``alias`` name this version of its group, and no other from now on."""
        return self._run(self._alias(address, alias))

    def unalias(self, group: str, alias: str) -> None:
        """Take an alias away; the version stays."""
        path = f"/model_packages/{segment(group)}/aliases/{segment(alias)}"
        self._run(self._transport.discard(path, during=f"unalias {group}@{alias}"))

    def delete(self, address: str, *, force: bool = False) -> ModelPackage:
        """Delete a version: what runs on it finishes, new requests are refused; it can be brought back for a while.

        Raises:
            Conflict: it has an alias, or is in use or the only copy and ``force`` is not given.
        """
        return self._run(self._delete(address, force))

    def undelete(self, address: str) -> ModelPackage:
        """Bring a deleted or expired version back."""
        return self._run(self._on(address, "undelete", ModelPackage))

    def verify(self, address: str) -> Verification:
        """Take a published adapter through the publish gate again, on every engine."""
        return self._run(self._on(address, "verify", Verification))

    def export(self, address: str, directory: str | Path) -> Sequence[Path]:
        """Download a version's files into ``directory`` (an adapter's are a PEFT directory); return their paths.

        What an earlier call left unfinished goes on, and every file is checked against its sha256.
        """
        return self._run(self._export(address, Path(directory)))

    def import_(
        self,
        group: str,
        adapter: str | Path,
        *,
        base_model: str,
        name: str | None = None,
        description: str | None = None,
        tags: Sequence[str] = (),
        ttl_seconds: int | None = None,
    ) -> SaveWeightsResponse:
        """Make a version of a PEFT adapter: its directory, or a tar of it. Returns when it is served.

        Raises:
            InvalidRequest: no adapter that can be served and trained; says what is wrong.
            OperationError: it does not fit the base model, or did not pass the gate.
        """
        params: dict[str, Any] = {
            "base_model": base_model,
            "name": name,
            "description": description,
            "ttl_seconds": ttl_seconds,
            "tags": [*tags],
        }
        return self._run(self._import(group, Path(adapter), params))

    async def list_async(self, *args: Any, **kwargs: Any) -> Sequence[ModelPackage]:
        return await self._off_loop(self.list, *args, **kwargs)

    async def show_async(self, address: str) -> ModelPackage:
        return await self._off_loop(self.show, address)

    async def alias_async(self, address: str, alias: str) -> ModelPackage:
        return await self._off_loop(self.alias, address, alias)

    async def unalias_async(self, group: str, alias: str) -> None:
        await self._off_loop(self.unalias, group, alias)

    async def delete_async(self, address: str, *, force: bool = False) -> ModelPackage:
        return await self._off_loop(self.delete, address, force=force)

    async def undelete_async(self, address: str) -> ModelPackage:
        return await self._off_loop(self.undelete, address)

    async def verify_async(self, address: str) -> Verification:
        return await self._off_loop(self.verify, address)

    async def export_async(self, address: str, directory: str | Path) -> Sequence[Path]:
        return await self._off_loop(self.export, address, directory)

    async def import_async(self, group: str, adapter: str | Path, **options: Any) -> SaveWeightsResponse:
        return await self._off_loop(self.import_, group, adapter, **options)

    async def _off_loop(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(call, *args, **kwargs)

    async def _list(self, group: str | None, most: int | None, **params: Any) -> Sequence[ModelPackage]:
        path = "/versions" if group is None else f"/model_packages/{segment(group)}"
        pages = self._transport.pages(ModelPackage, path, during="versions.list", **params)
        return [package async for package in first(pages, most)]

    async def _show(self, address: str, call: str) -> ModelPackage:
        path = f"/versions/{segment(address)}"
        return await self._transport.get(ModelPackage, path, during=f"versions.{call} of {address}")

    async def _path(self, address: str, call: str) -> str:
        package = await self._show(address, call)
        return f"/model_packages/{segment(package.group)}/{package.number}"

    async def _alias(self, address: str, alias: str) -> ModelPackage:
        package = await self._show(address, "alias")
        path = f"/model_packages/{segment(package.group)}/aliases/{segment(alias)}"
        answer = await self._transport.ask(
            "PUT", path, during=f"versions.alias of {address}", content=encode({"version": package.number})
        )
        return parse(ModelPackage, answer.response, f"versions.alias of {address}")

    async def _delete(self, address: str, force: bool) -> ModelPackage:
        path, during = await self._path(address, "delete"), f"versions.delete of {address}"
        answer = await self._transport.ask("DELETE", path, during=during, params={"force": str(force).lower()})
        return parse(ModelPackage, answer.response, during)

    async def _on(self, address: str, verb: str, kind: type[Any]) -> Any:
        path = await self._path(address, verb)
        timeout_s = self._connection.sample_timeout_s  # an engine may have to start the version first
        return await self._transport.post(
            kind, f"{path}/{verb}", b"", during=f"versions.{verb} of {address}", timeout_s=timeout_s
        )

    async def _export(self, address: str, directory: Path) -> Sequence[Path]:
        path, during = await self._path(address, "export"), f"versions.export of {address}"
        exported = await self._transport.get(Exported, f"{path}/export", during=during)
        targets = [directory / file.name for file in exported.files]
        for file, target in zip(exported.files, targets, strict=True):
            await download(self._transport, file, target, during=during)
        return targets

    async def _import(self, group: str, adapter: Path, params: dict[str, Any]) -> SaveWeightsResponse:
        content, during = await asyncio.to_thread(archive_of, adapter), f"versions.import_ of {adapter}"
        given = {name: value for name, value in params.items() if value not in (None, [])}
        answer = await self._transport.send(
            f"/model_packages/{segment(group)}/import",
            content,
            media_type=TAR,
            params=given,
            during=during,
            timeout_s=self._connection.sample_timeout_s,
        )
        operation = parse(Operation, answer.response, during)
        return await Submitter(self._transport, operation.session_id).finish(operation, SaveWeightsResponse)


async def first(packages: AsyncIterator[ModelPackage], most: int | None) -> AsyncIterator[ModelPackage]:
    """Yield as many as wanted; None: all."""
    left = most
    async for package in packages:
        if left is not None and left <= 0:
            return
        left = None if left is None else left - 1
        yield package
