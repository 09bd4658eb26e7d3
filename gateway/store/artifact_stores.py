"""Where this deployment's artefacts are: a directory, or an object store with a directory as its cache."""

from gateway.places import Places
from gateway.store.artifacts import LocalArtifacts
from gateway.store.copies import Copies
from gateway.store.object_store import ObjectArtifacts


def open_artifacts(places: Places) -> LocalArtifacts | ObjectArtifacts:
    """Return the store that the settings name. Raises ValueError: the URL is none."""
    local = LocalArtifacts(places.artifact_dir)
    if places.object_store is None:
        return local
    copies = Copies(local, limit_bytes=places.object_store_cache_bytes)
    return ObjectArtifacts(places.object_store, endpoint=places.object_store_endpoint, cache=local, copies=copies)
