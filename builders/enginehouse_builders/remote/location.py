"""One remote store: a URL that fsspec understands, the few operations we need of it, and its errors in our words.

Layout below the URL, one folder per build, so that removing a build is removing its folder::

    sha256-3991582e0c2e1a7f/manifest.json                          written last: without it there is no build
    sha256-3991582e0c2e1a7f/files/9f2c64d0b1e3a857/tokenizer.json  the start of the file's SHA-256, then its name

An object's key holds its digest, so two pushers of one build never write different bytes under one key.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import fsspec
from fsspec.core import url_to_fs

from enginehouse_contract.errors import ConfigurationError, EnginehouseError, RemoteStoreError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONNECT_TIMEOUT_S: Final = 10
_SCRATCH_PREFIX: Final = ".uploading-"
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_SCHEME: Final = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.IGNORECASE)

_CREDENTIAL_ERRORS: Final = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "TokenRetrievalError",
        "DefaultCredentialsError",
        "RefreshError",
        "GoogleAuthError",
        "PermissionError",
    }
)
"""Names, not classes: the libraries that define them are extras and may not be installed."""


_REFUSED_STATUS: Final = frozenset({401, 403, "401", "403"})


for _library in ("gcsfs", "s3fs"):
    logging.getLogger(_library).addHandler(logging.NullHandler())  # what they log on stderr, our errors say


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """A store of builds behind a URL. Every method raises errors of our tree only."""

    url: str
    _filesystem: Any
    _root: str

    def names(self) -> list[str]:
        """Return the names directly below the URL; none where the folder does not exist yet."""
        with _in_our_words(self.url), suppress(FileNotFoundError):
            return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in self._filesystem.ls(self._root, detail=False))
        return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Return key -> bytes of every object below a build's *folder*."""
        with _in_our_words(self.url), suppress(FileNotFoundError):
            found = self._filesystem.find(self._path(folder), detail=True)
            return {path[len(self._root) + 1 :]: int(info["size"]) for path, info in found.items()}
        return {}

    def read(self, key: str) -> bytes | None:
        """Return a small object's bytes, or None where there is none."""
        with _in_our_words(self.url), suppress(FileNotFoundError):
            return bytes(self._filesystem.cat_file(self._path(key)))
        return None

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Return bytes [*start*, *end*) of an object."""
        with _in_our_words(self.url):
            return bytes(self._filesystem.cat_file(self._path(key), start=start, end=end))

    def upload(self, source: Path, key: str) -> None:
        """Put a file's bytes under *key*: nobody sees half of them."""
        with _in_our_words(self.url):
            if self._is_local:
                _copy_then_rename(source, Path(self._path(key)))
            else:
                self._filesystem.put_file(str(source), self._path(key))

    def url_of(self, key: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url}/{key}"

    @property
    def _is_local(self) -> bool:
        protocols = self._filesystem.protocol
        return "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


def is_url(text: str) -> bool:
    """Return whether a reference to a build names a remote store."""
    return _SCHEME.match(text) is not None


def open_store(url: str) -> RemoteStore:
    """Return the store behind *url* (``file://``, ``s3://``, ``gs://`` or another that fsspec knows).

    Nothing is asked of it yet. Raises :class:`ConfigurationError` for a URL that fsspec cannot open, saying what to
    install.
    """
    scheme = _SCHEME.match(url)
    if scheme is None:
        hint = "Write file:///folder, s3://bucket/folder or gs://bucket/folder."
        raise ConfigurationError(refusal("URL", "must name a store with its kind", given=url, hint=hint))
    kind, place = scheme[1].lower(), url[scheme.end() :].rstrip("/")
    if not place:
        raise ConfigurationError(refusal("URL", "names no bucket or folder", given=url))
    url = f"{kind}://{place}"
    options: dict[str, Any] = {"use_listings_cache": False}
    if _EXTRAS.get(kind) == "s3":
        options["config_kwargs"] = {"connect_timeout": _CONNECT_TIMEOUT_S, "retries": {"max_attempts": 2}}
    try:
        filesystem, root = url_to_fs(url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(kind)
        advice = f"install it with `pip install 'enginehouse[{extra}]'`" if extra else str(error)
        raise ConfigurationError(f"{kind}:// stores need one more package: {advice}.") from error
    except ValueError as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise ConfigurationError(f"`{url}`: {error}. Known kinds: {known}.") from error
    return RemoteStore(url, filesystem, root.rstrip("/"))


@contextmanager
def _in_our_words(url: str) -> Iterator[None]:
    """Turn what a storage library raises into an error that says what to do; FileNotFoundError passes for callers."""
    try:
        yield
    except EnginehouseError:
        raise
    except FileNotFoundError as error:
        raise _missing(url, error) from error
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        words = " ".join(str(error).split()) or type(error).__name__
        if kinds & _CREDENTIAL_ERRORS or getattr(error, "code", None) in _REFUSED_STATUS:
            msg = (
                f"{url} refused us: {words.rstrip('.')}. Check the credentials of this account (AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY or a profile; `gcloud auth application-default login`; the folder's owner)."
            )
            raise ConfigurationError(msg) from error
        raise RemoteStoreError(f"{url} does not answer as it should ({words.rstrip('.')}); try again later.") from error


def _missing(url: str, error: FileNotFoundError) -> EnginehouseError:
    return ConfigurationError(f"{url} does not exist ({error}); create the bucket or folder, or correct the URL.")


def _copy_then_rename(source: Path, destination: Path) -> None:
    """Copy beside the destination, then rename; what killed pushers left there is removed."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    for leftover in destination.parent.glob(f"{_SCRATCH_PREFIX}*"):
        _remove_if_abandoned(leftover)
    with _locked_scratch_file(destination.parent) as scratch:
        with source.open("rb") as stream:
            shutil.copyfileobj(stream, scratch, 1 << 20)
        scratch.flush()
        os.fsync(scratch.fileno())
        os.fchmod(scratch.fileno(), 0o644)
        Path(scratch.name).replace(destination)


@contextmanager
def _locked_scratch_file(folder: Path) -> Iterator[IO[bytes]]:
    """A new file, locked while in use: the lock is gone when its process is, however that ended."""
    while True:
        with tempfile.NamedTemporaryFile(prefix=_SCRATCH_PREFIX, dir=folder, delete=False) as scratch:
            fcntl.flock(scratch.fileno(), fcntl.LOCK_EX)
            if os.fstat(scratch.fileno()).st_nlink == 0:
                continue  # another pusher took it for a leftover before it was locked
            try:
                yield scratch
            finally:
                Path(scratch.name).unlink(missing_ok=True)
            return


def _remove_if_abandoned(scratch: Path) -> None:
    with suppress(FileNotFoundError, BlockingIOError), scratch.open("rb") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        scratch.unlink(missing_ok=True)
