"""Artefacts in an S3-compatible store. Engines and trainers read them from a local cache, a directory as without one.

An artefact is there once its manifest is, which is uploaded last and removed first. What is brought here appears whole
and under hashes that were checked; what is found damaged here is thrown away and brought again. Keys are
``<prefix><location>/<file>``; a location is never written with other content, so the cache is never out of date. It is
bounded, see ``copies``.
"""

import errno
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from gateway.core.disk import write_failed
from gateway.core.errors import Unavailable
from gateway.core.manifest import MANIFEST_NAME, Manifest, parse_manifest
from gateway.core.ports import CorruptArtifact
from gateway.store.artifacts import LocalArtifacts
from gateway.store.copies import Copies

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([a-zA-Z0-9._/-]{1,200}))?")
_AWAY = (BotoCoreError, ClientError, Boto3Error)
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_ATTEMPTS = 5  # of one request, with backoff between them
_REMOVED_AT_ONCE = 1000


class ObjectArtifacts:
    """Artifacts in the bucket and below the prefix that ``url`` names (``s3://bucket/prefix``), cached in ``cache``,
    which ``copies`` keeps small.

    Credentials and region are those of the environment, as boto3 finds them. ``endpoint`` is where the store answers
    when that is not Amazon's.

    Raises:
        ValueError: ``url`` is none.
    """

    def __init__(self, url: str, *, endpoint: str | None, cache: LocalArtifacts, copies: Copies) -> None:
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError(f"{url!r} is not of the form s3://bucket/prefix")
        self._bucket = found[1]
        self._prefix = f"{found[2].strip('/')}/" if found[2] else ""
        self._cache, self._copies = cache, copies
        session: Any = boto3.Session()
        self._s3: Any = session.client(
            "s3",
            endpoint_url=endpoint,
            region_name=session.region_name or "us-east-1",
            config=Config(
                retries={"mode": "standard", "max_attempts": _ATTEMPTS},
                connect_timeout=5,
                read_timeout=60,
                s3={"addressing_style": "path" if endpoint else "auto"},
            ),
        )

    @property
    def url(self) -> str | None:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def path(self, location: str) -> Path:
        return self._cache.path(location)

    def fetch(self, location: str, manifest_sha256: str | None) -> Manifest:
        """As the port says."""
        self._copies.note_use(location)
        try:
            return self._cache.fetch(location, manifest_sha256)
        except (CorruptArtifact, Unavailable):
            self._bring(location, manifest_sha256)
        return self._cache.fetch(location, manifest_sha256)

    def verify(self, location: str, manifest_sha256: str | None) -> Manifest:
        """As the port says. A copy that was damaged here is replaced by the store's."""
        self._copies.note_use(location)
        try:
            return self._cache.verify(location, manifest_sha256)
        except (CorruptArtifact, Unavailable):
            self._bring(location, manifest_sha256)
        return self._cache.verify(location, manifest_sha256)

    def stage(self, location: str, *, size_bytes: int = 0) -> Path:
        return self._cache.stage(location, size_bytes=size_bytes)

    def commit(self, temporary: Path, manifest: Manifest) -> str:
        """As the port says; the store has everything before the directory here is final.

        Raises:
            OSError: the store does not take it.
        """
        location = self._cache.check_staged(temporary, manifest)
        try:
            for name in sorted(manifest.files):
                self._s3.upload_file(str(temporary / name), self._bucket, self._key(location, name))
            self._s3.put_object(Bucket=self._bucket, Key=self._key(location, MANIFEST_NAME), Body=manifest.to_json())
        except _AWAY as error:
            raise OSError(errno.EIO, f"the object store did not take {location}: {error}") from error
        sha256 = self._cache.commit(temporary, manifest)
        self._trim()
        return sha256

    def discard(self, temporary: Path) -> None:
        self._cache.discard(temporary)

    def remove(self, location: str) -> None:
        """As the port says. A copy on another machine is among what its own ``older_than`` returns."""
        try:
            self._s3.delete_object(Bucket=self._bucket, Key=self._key(location, MANIFEST_NAME))
            self._delete([key for key, _ in self._objects(f"{location}/")])
        except _AWAY as error:
            raise _away() from error
        self._cache.remove(location)

    def older_than(self, age_s: float) -> Sequence[str]:
        """As the port says: in the store, and here, where the only copy may lie from before the store was set up."""
        before = datetime.now(UTC) - timedelta(seconds=age_s)
        try:
            stored = [
                location
                for key, written in self._objects()
                if written < before and (location := self._committed(key)) is not None
            ]
        except _AWAY as error:
            raise _away() from error
        return sorted({*stored, *self._cache.older_than(age_s)})

    def tidy(self, age_s: float) -> None:
        """As the port says, with old uploads that were never committed."""
        before = datetime.now(UTC) - timedelta(seconds=age_s)
        try:
            objects = list(self._objects())
            committed = {location for key, _ in objects if (location := self._committed(key)) is not None}
            self._delete([key for key, written in objects if written < before and self._location(key) not in committed])
        except _AWAY as error:
            raise _away() from error
        self._cache.tidy(age_s)

    def note_use(self, version_ids: Collection[str]) -> None:
        """Keep this machine's copies of these versions for a while longer."""
        for location in self._cache.locations():
            if location.rpartition("-")[0] in version_ids:
                self._copies.note_use(location)

    def _trim(self) -> None:
        with suppress(*_AWAY):  # nothing is known to be stored then, and nothing goes
            self._copies.trim(self._is_stored)

    def _is_stored(self, location: str) -> bool:
        """A store that was set up after a directory had been used does not have what that holds."""
        try:
            self._s3.head_object(Bucket=self._bucket, Key=self._key(location, MANIFEST_NAME))
        except ClientError as error:
            if error.response["Error"]["Code"] in _MISSING:
                return False
            raise
        return True

    def _bring(self, location: str, manifest_sha256: str | None) -> None:
        """Make the cache's copy anew from the store's.

        Raises:
            CorruptArtifact: the store has no such artefact, or another one.
            Unavailable: it is away, or this machine's disk takes no copy.
        """
        self._cache.path(location)
        try:
            text: bytes = self._s3.get_object(Bucket=self._bucket, Key=self._key(location, MANIFEST_NAME))[
                "Body"
            ].read()
            if manifest_sha256 not in (None, hashlib.sha256(text).hexdigest()):
                raise CorruptArtifact(f"{location}: the store's manifest is not the one that was recorded")
            manifest = parse_manifest(text)
            with self._cache.incoming(location, manifest_sha256) as directory:
                for name in manifest.files:
                    if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
                        raise ValueError(f"{name!r} is no file of an artefact")
                    target = directory / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._s3.download_file(self._bucket, self._key(location, name), str(target))
                (directory / MANIFEST_NAME).write_bytes(text)
            self._trim()
        except ClientError as error:
            if error.response["Error"]["Code"] in _MISSING:
                raise CorruptArtifact(f"{location}: the store does not have all of it") from error
            raise _away() from error
        except _AWAY as error:
            raise _away() from error
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptArtifact(f"{location}: the manifest cannot be read: {error}") from error
        except OSError as error:
            raise write_failed(error) from error

    def _objects(self, below: str = "") -> Iterator[tuple[str, datetime]]:
        pages: Any = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + below
        )
        for page in pages:
            for entry in page.get("Contents", ()):
                yield entry["Key"], entry["LastModified"]

    def _delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _REMOVED_AT_ONCE):
            some = [{"Key": key} for key in keys[start : start + _REMOVED_AT_ONCE]]
            self._s3.delete_objects(Bucket=self._bucket, Delete={"Objects": some, "Quiet": True})

    def _key(self, location: str, name: str) -> str:
        return f"{self._prefix}{location}/{name}"

    def _location(self, key: str) -> str:
        return key.removeprefix(self._prefix).partition("/")[0]

    def _committed(self, key: str) -> str | None:
        """Return the location whose manifest ``key`` is."""
        location = self._location(key)
        return location if key == self._key(location, MANIFEST_NAME) else None


def _away() -> Unavailable:
    return Unavailable("the object store cannot be reached", code="object_store_away")
