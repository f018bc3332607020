"""A build by whatever names it, as a folder of this host: the one call that promotion needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_builders.remote.location import is_url, open_store
from enginehouse_builders.remote.transfer import pull_build
from enginehouse_builders.store import find_build
from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def ensure_local(
    reference: str, home: Path, progress: Callable[[str, float], None] = lambda _stage, _done: None
) -> Path:
    """Return the folder of the build that *reference* names, fetching it into the store of *home* where it is remote.

    *reference* is a folder, a build id or the start of one, a model name, or a URL whose last part is one of these:
    ``s3://bucket/builds/sha256:3991582e0c2e``. *progress* is called with a stage and a fraction.

    Raises :class:`ConfigurationError` when no build has that name, :class:`BuildIntegrityError` when what is there is
    damaged, :class:`RemoteStoreError` when the remote store does not answer.
    """
    store_dir = Settings(home=home).store_dir
    if not is_url(reference):
        return find_build(store_dir, reference).build_dir
    url, _, name = reference.rstrip("/").rpartition("/")
    if url.endswith(("/", ":")) or not url:
        hint = "Write s3://bucket/folder/BUILD."
        raise ConfigurationError(
            refusal("BUILD", "must be a store's URL and a build's name", given=reference, hint=hint)
        )
    return pull_build(open_store(url), name, store_dir, progress).build.build_dir
