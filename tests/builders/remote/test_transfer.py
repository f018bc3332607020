"""Remote stores: pushes and pulls over a local folder and over a real S3 server; damage found and named."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.support.object_stores import S3Server, s3_server
from tests.support.small_builds import write_build

from enginehouse_builders.remote.local import ensure_local
from enginehouse_builders.remote.location import RemoteStore, open_store
from enginehouse_builders.remote.transfer import find_remote, list_remote, pull_build, push_build
from enginehouse_builders.store import list_builds
from enginehouse_contract.errors import BuildIntegrityError, ConfigurationError, RemoteStoreError
from enginehouse_contract.manifest import MANIFEST_FILE, verify_build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def quiet(stage: str, fraction: float) -> None:
    """No progress."""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of its own for each test."""
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteStore:
    """A store of each kind, empty."""
    if request.param == "s3":
        return open_store(request.getfixturevalue("s3").url)
    return open_store(f"file://{tmp_path}/remote")


def keys(store: RemoteStore) -> list[str]:
    """Every object of a store."""
    return [key for name in store.names() for key in store.sizes(name)]


def harm(store: RemoteStore, key: str, data: bytes | None) -> None:
    """Replace an object's bytes behind the store's back, or remove it."""
    path = f"{store._root}/{key}"
    if data is None:
        store._filesystem.rm_file(path)
    else:
        store._filesystem.pipe_file(path, data)


def test_a_build_comes_back_as_it_was(store: RemoteStore, tmp_path: Path) -> None:
    """Push, pull into an empty store: the same files under the same folder name, and listed there."""
    build = write_build(tmp_path / "here", name="small", files={"a.bin": b"x" * 70_000, "deep/b.json": b"{}"})

    pushed = push_build(build, store, quiet)
    pulled = pull_build(store, "small", tmp_path / "there", quiet)

    assert (pushed.num_files_sent, pushed.num_bytes_sent, pushed.was_there) == (3, 70_002, False)
    assert (pulled.num_bytes_fetched, pulled.was_there) == (70_002, False)
    assert pulled.build.build_dir == tmp_path / "there" / build.name
    assert verify_build(pulled.build.build_dir) == pushed.manifest
    assert [found.manifest.build_id for found in list_builds(tmp_path / "there")] == [pushed.manifest.build_id]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [build.name]


def test_what_is_there_is_not_sent_or_fetched_again(store: RemoteStore, tmp_path: Path) -> None:
    """A second push sends nothing and a second pull fetches nothing."""
    build = write_build(tmp_path / "here", files={"a.bin": b"abc"})
    push_build(build, store, quiet)
    pull_build(store, build.name, tmp_path / "there", quiet)

    assert push_build(build, store, quiet).was_there
    assert pull_build(store, build.name, tmp_path / "there", quiet).was_there


@pytest.mark.parametrize(
    "reference", ["sha256:{id}", "sha256-{id}", "{id}", "{start}", "sha256:{start}", "small", "{folder}"]
)
def test_every_way_to_name_a_build_works(reference: str, tmp_path: Path) -> None:
    """Whole ids, starts of ids, folder names and model names all find the build."""
    build = write_build(tmp_path / "here", name="small", files={"a.bin": b"abc"})
    store = open_store(f"file://{tmp_path}/remote")
    manifest = push_build(build, store, quiet).manifest
    digits = manifest.build_id.removeprefix("sha256:")

    asked = reference.format(id=digits, start=digits[:9], folder=build.name)

    assert find_remote(store, asked).build_id == manifest.build_id


def test_unknown_and_ambiguous_names_say_what_there_is(tmp_path: Path) -> None:
    """The refusal lists the builds that could be meant."""
    store = open_store(f"file://{tmp_path}/remote")
    with pytest.raises(ConfigurationError, match="there: none"):
        find_remote(store, "small")
    for letter in (b"a", b"b"):
        push_build(write_build(tmp_path / "here", name="small", files={"a.bin": letter}), store, quiet)

    with pytest.raises(ConfigurationError, match=r"no build is called `large` at file://.*small \(sha256:"):
        find_remote(store, "large")
    with pytest.raises(ConfigurationError, match="could be any of sha256:"):
        find_remote(store, "sha256:")


def test_the_manifest_is_the_last_thing_a_push_writes(
    store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that ends early, wherever, leaves no build behind; the next one sends only what is missing."""
    files = {f"{index}.bin": bytes([index]) * 100 for index in range(4)}
    build = write_build(tmp_path / "here", files=files)
    upload, num_uploads = RemoteStore.upload, 0

    def upload_three(self: RemoteStore, source: Path, key: str) -> None:
        nonlocal num_uploads
        if num_uploads == 3:
            raise RemoteStoreError("the line was cut")
        num_uploads += 1
        upload(self, source, key)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "upload", upload_three)
        with pytest.raises(RemoteStoreError):
            push_build(build, store, quiet)

    assert list_remote(store) == []
    assert push_build(build, store, quiet).num_files_sent == 2  # the fourth file and the manifest
    assert pull_build(store, build.name, tmp_path / "there", quiet).num_bytes_fetched == 400


def test_a_pull_goes_on_where_it_stopped(store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull that ends in the middle of a file publishes nothing; the next one fetches only the rest."""
    build = write_build(tmp_path / "here", files={"a.bin": bytes(range(250)) * 4, "b.bin": b"b" * 50})
    push_build(build, store, quiet)
    monkeypatch.setattr("enginehouse_builders.remote.transfer._CHUNK_BYTES", 300)
    read_range, num_reads = RemoteStore.read_range, 0

    def read_twice(self: RemoteStore, key: str, start: int, end: int) -> bytes:
        nonlocal num_reads
        if num_reads == 2:
            raise RemoteStoreError("the line was cut")
        num_reads += 1
        return read_range(self, key, start, end)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "read_range", read_twice)
        with pytest.raises(RemoteStoreError):
            pull_build(store, build.name, tmp_path / "there", quiet)

    assert list_builds(tmp_path / "there") == []
    assert pull_build(store, build.name, tmp_path / "there", quiet).num_bytes_fetched == 1050 - 600
    assert verify_build(tmp_path / "there" / build.name).build_id


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_object_is_named(store: RemoteStore, tmp_path: Path, damage: str) -> None:
    """Truncated, changed and missing objects are found by a pull, which names them and publishes nothing."""
    build = write_build(tmp_path / "here", files={"a.bin": b"a" * 100, "b.bin": b"b" * 100})
    push_build(build, store, quiet)
    (key,) = (key for key in keys(store) if key.endswith("b.bin"))
    harm(store, key, {"truncated": b"b" * 60, "changed": b"c" * 100, "missing": None}[damage])
    words = {"truncated": "has 60 of 100 bytes", "changed": "SHA-256", "missing": "is missing"}[damage]

    with pytest.raises(BuildIntegrityError, match=words) as caught:
        pull_build(store, build.name, tmp_path / "there", quiet)

    assert store.url_of(key) in str(caught.value)
    assert list_builds(tmp_path / "there") == []


def test_a_push_repairs_what_is_cut_or_gone(store: RemoteStore, tmp_path: Path) -> None:
    """A build whose object is truncated at the store is not taken for whole: that object is sent again."""
    build = write_build(tmp_path / "here", files={"a.bin": b"a" * 100, "b.bin": b"b" * 100})
    push_build(build, store, quiet)
    (key,) = (key for key in keys(store) if key.endswith("b.bin"))
    harm(store, key, b"b" * 60)

    assert push_build(build, store, quiet).num_bytes_sent == 100
    assert pull_build(store, build.name, tmp_path / "there", quiet).num_bytes_fetched == 200


def test_a_damaged_local_copy_is_replaced(store: RemoteStore, tmp_path: Path) -> None:
    """A pull checks the digests of what lies here already, and brings it again when they are wrong."""
    build = write_build(tmp_path / "here", files={"a.bin": b"a" * 100})
    push_build(build, store, quiet)
    local = pull_build(store, build.name, tmp_path / "there", quiet).build.build_dir
    (local / "a.bin").write_bytes(b"z" * 100)

    assert not pull_build(store, build.name, tmp_path / "there", quiet).was_there
    assert verify_build(local).build_id


def test_two_pushers_of_one_build_with_other_bytes(store: RemoteStore, tmp_path: Path) -> None:
    """Builders that are not deterministic give one id other bytes: whatever the order of writes, a pull is whole."""
    builds = [
        write_build(tmp_path / f"host{host}", build_id="sha256:" + "7" * 64, files={"a.bin": letter * 5000})
        for host, letter in enumerate((b"a", b"b"))
    ]
    failures: list[BaseException] = []

    def push(build: Path) -> None:
        try:
            push_build(build, store, quiet)
        except BaseException as error:  # noqa: BLE001 - reported by the assertion
            failures.append(error)

    threads = [threading.Thread(target=push, args=(build,)) for build in builds * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    pulled = pull_build(store, "7" * 64, tmp_path / "there", quiet).build
    assert failures == []
    assert (pulled.build_dir / "a.bin").read_bytes() in {b"a" * 5000, b"b" * 5000}
    assert len([key for key in keys(store) if ".uploading-" in key]) == 0


def test_two_pullers_on_one_host(store: RemoteStore, tmp_path: Path) -> None:
    """Of pulls at the same time one fetches; the others wait and find the build."""
    build = write_build(tmp_path / "here", files={"a.bin": b"a" * 5000})
    push_build(build, store, quiet)
    fetched: list[int] = []

    def pull() -> None:
        fetched.append(pull_build(store, build.name, tmp_path / "there", quiet).num_bytes_fetched)

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(fetched) == [0, 0, 0, 5000]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [build.name]


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", MANIFEST_FILE, "a//b", ""])
def test_a_manifest_cannot_write_outside_its_build(name: str, tmp_path: Path) -> None:
    """A store that strangers write to cannot make a pull touch another path."""
    build = write_build(tmp_path / "here", files={"a.bin": b"abc"})
    text = (build / MANIFEST_FILE).read_text().replace('"a.bin"', f'"{name}"')
    remote = tmp_path / "remote" / build.name
    remote.mkdir(parents=True)
    (remote / MANIFEST_FILE).write_text(text)

    with pytest.raises(BuildIntegrityError, match="names a file outside its build"):
        pull_build(open_store(f"file://{tmp_path}/remote"), build.name, tmp_path / "there", quiet)


def test_a_manifest_in_anothers_folder_is_refused(tmp_path: Path) -> None:
    """A folder renamed to another build's id does not become that build."""
    store = open_store(f"file://{tmp_path}/remote")
    build = write_build(tmp_path / "here", files={"a.bin": b"abc"})
    push_build(build, store, quiet)
    (tmp_path / "remote" / build.name).rename(tmp_path / "remote" / ("sha256-" + "9" * 16))

    with pytest.raises(BuildIntegrityError, match="not that of its folder"):
        pull_build(store, "9" * 64, tmp_path / "there", quiet)


def test_what_a_killed_pusher_left_is_removed(tmp_path: Path) -> None:
    """Unlocked scratch files beside an object go with the next push."""
    store = open_store(f"file://{tmp_path}/remote")
    build = write_build(tmp_path / "here", files={"a.bin": b"abc"})
    scratch = tmp_path / "remote" / build.name / ".uploading-dead"
    scratch.parent.mkdir(parents=True)
    scratch.write_bytes(b"half")

    push_build(build, store, quiet)

    assert not scratch.exists()


def test_ensure_local_takes_urls_and_local_names(store: RemoteStore, tmp_path: Path) -> None:
    """The one call for promotion: a URL is fetched once, afterwards its id is known here too."""
    build = write_build(tmp_path / "here", name="small", files={"a.bin": b"abc"})
    push_build(build, store, quiet)

    fetched = ensure_local(f"{store.url}/{build.name}", tmp_path / "home")

    assert fetched == tmp_path / "home" / "store" / build.name
    assert ensure_local("small", tmp_path / "home") == fetched
    assert ensure_local(str(fetched), tmp_path / "home") == fetched


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_is_named(tmp_path: Path) -> None:
    """A push to a bucket that does not exist says so; a pull finds no build there."""
    store = open_store("s3://nobody/builds")

    with pytest.raises(ConfigurationError, match=r"s3://nobody/builds does not exist .*bucket"):
        push_build(write_build(tmp_path, files={"a.bin": b"abc"}), store, quiet)
    with pytest.raises(ConfigurationError, match="no build is called `small` at s3://nobody/builds"):
        pull_build(store, "small", tmp_path / "there", quiet)


@pytest.mark.slow
def test_no_credentials_are_a_clear_error(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials the refusal says which variables to set, and nothing hangs."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))

    with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID"):
        push_build(write_build(tmp_path, files={"a.bin": b"abc"}), open_store(s3.url), quiet)


@pytest.mark.slow
def test_a_refused_account_is_a_clear_error(s3: S3Server, tmp_path: Path) -> None:
    """An account that the server does not know is told to check its credentials."""
    s3.check_credentials()

    with pytest.raises(ConfigurationError, match="Check the credentials"):
        push_build(write_build(tmp_path, files={"a.bin": b"abc"}), open_store(s3.url), quiet)


def test_a_server_that_is_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the endpoint: an error of the remote store, soon."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    with pytest.raises(RemoteStoreError, match="does not answer"):
        push_build(write_build(tmp_path, files={"a.bin": b"abc"}), open_store("s3://engines/builds"), quiet)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("engines/builds", "must name a store with its kind"),
        ("nosuch://engines", "Known kinds: .*s3"),
        ("s3://", "names no bucket"),
        ("file:///", "names no bucket or folder"),
    ],
)
def test_bad_urls_are_refused(url: str, words: str) -> None:
    """A URL that names no store is refused with what to write."""
    with pytest.raises(ConfigurationError, match=words):
        open_store(url)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the error names it."""

    def refuse(*_: object, **__: object) -> None:
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr("enginehouse_builders.remote.location.url_to_fs", refuse)

    with pytest.raises(ConfigurationError, match=r"pip install 'enginehouse\[gcs\]'"):
        open_store("gs://engines")
