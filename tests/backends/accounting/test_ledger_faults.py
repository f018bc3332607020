"""Faults: kill -9 of writers and of the database, a full disk, a folder that cannot be written."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select
from tests.backends.accounting.conftest import BOOK
from tests.support.ledger_faults import run_faults

from enginehouse_backends.accounting.database import connect
from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.ledger_meter import LedgerMeter
from enginehouse_backends.accounting.meter import NoMeter
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.records import Reservation, Settlement
from enginehouse_backends.accounting.schema import holds
from enginehouse_backends.accounting.setup import open_ledger, open_meter
from enginehouse_backends.accounting.views import records
from enginehouse_contract.errors import ConfigurationError, LedgerUnavailableError
from enginehouse_contract.settings import Settings, load_settings
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.postgres import PostgresServer

_NOBODY = 65534
CLEAN = {"lost": 0, "double": 0, "open": 0, "wrong": 0}


@pytest.mark.slow
def test_killed_writers_lose_nothing_and_double_nothing(ledger_url: str) -> None:
    """What was acknowledged is there, once, as acknowledged; the rest is settled from durable counts; none is open."""
    result = run_faults(ledger_url, num_rounds=4, seed=5)

    assert result == {**CLEAN, "requests": result["requests"]}
    assert result["requests"] >= 6  # each writer had opened one


@pytest.mark.slow
def test_a_database_that_is_killed_again_and_again_loses_nothing(postgres: PostgresServer) -> None:
    """Requests go on under the serving policy; once the database is back each has exactly its own record."""
    url = postgres.create_database("killed")
    ledger = Ledger(url)
    ledger.add_price_book(parse_price_book(BOOK))
    meter = LedgerMeter(ledger, "serve", progress_period_s=0.0)
    done = threading.Event()
    opened: list[int] = []

    def run(thread: int) -> None:
        number = 0
        while not done.is_set():
            number += 1
            request = meter.open(
                tenant=f"t{thread}",
                request_id=f"{number}",
                model="small",
                build_id="b",
                upper_bound=TokenUsage(9, 0, 9),
            )
            request.progress(TokenUsage(9, 0, 1))
            request.settle(TokenUsage(9, 0, number % 9), "stop")
        opened.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.3)
        postgres.kill()
        time.sleep(0.1)
        postgres.start()
    done.set()
    for thread in threads:
        thread.join()
    deadline_s = time.monotonic() + 60
    while meter.counts()["owed"] and time.monotonic() < deadline_s:
        time.sleep(0.05)
    found = records(ledger.database, limit=10**9)
    counts = meter.counts()
    with ledger.database.connect() as connection:
        num_open = connection.execute(select(func.count()).select_from(holds)).scalar_one()
    meter.close()

    assert len(found) == len({record.key[:2] for record in found}) == sum(opened)
    assert all(record.usage.num_output_tokens == int(record.key.request_id) % 9 for record in found)
    assert not any(record.is_recovered for record in found)
    assert (counts["owed"], num_open) == (0, 0)
    assert counts["failed"] > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 600 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("A REALLY FULL DISK IS NOT TESTED: mounting one needs root")
    command = [mount, "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:  # noqa: S603 - our own arguments
        pytest.skip("A REALLY FULL DISK IS NOT TESTED: mounting one is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S603, S607 - our own arguments


def fill(ledger: Ledger) -> tuple[int, LedgerUnavailableError]:
    """Meter requests until the ledger fails; return how many were settled."""
    for number in range(10_000):
        try:
            key = ledger.reserve(Reservation("acme", f"r{number}", "small", "b", TokenUsage(1, 0, 1))).key
            ledger.settle(Settlement(key, TokenUsage(1, 0, 1), "stop"))
        except LedgerUnavailableError as error:
            return number, error
    raise AssertionError("the disk did not fill up")


def test_a_full_disk_is_told_and_loses_nothing(small_disk: Path) -> None:
    """The error says so; what was settled is there; the ledger goes on when there is room again."""
    ballast = small_disk / "ballast"
    with Ledger(f"sqlite:///{small_disk / 'ledger.db'}") as ledger:
        ledger.add_price_book(parse_price_book(BOOK))
        ballast.write_bytes(bytes(100_000))
        num_settled, error = fill(ledger)
        assert num_settled > 0
        assert "database or disk is full. Free some space" in str(error)
        ballast.unlink()
        assert len(records(ledger.database, limit=10**6)) == num_settled
        key = ledger.reserve(Reservation("acme", "afterwards", "small", "b", TokenUsage(1, 0, 1))).key
        assert ledger.settle(Settlement(key, TokenUsage(1, 0, 1), "stop")).key == key


def _fill_within_file_size_limit(url: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Ledger(url) as ledger:
        ledger.add_price_book(parse_price_book(BOOK))
        num_settled, error = fill(ledger)
        sys.stdout.write(f"{num_settled}\n{error}\n")


def run_apart(function: str, url: str) -> str:
    """Run a function of this module in a process of its own, and return what it printed."""
    code = f"import tests.backends.accounting.test_ledger_faults as t; t.{function}({url!r})"
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_quota_that_is_used_up_is_told_and_loses_nothing(tmp_path: Path) -> None:
    """As a full disk; the next process finds everything that was settled."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    num_settled, error = run_apart("_fill_within_file_size_limit", url).splitlines()
    with Ledger(url) as ledger:
        ledger.recover()
        found = [record for record in records(ledger.database, limit=10**6) if not record.is_recovered]

    assert "failed: " in error
    assert len(found) == int(num_settled) > 0


def _open_and_say_why_not(url: str) -> None:
    Ledger("sqlite://").close()  # imports what it needs while it may
    if os.geteuid() == 0:
        os.seteuid(_NOBODY)  # root writes everywhere
    try:
        Ledger(url)
    except LedgerUnavailableError as error:
        sys.stdout.write(str(error))


def test_a_folder_that_cannot_be_written_is_told() -> None:
    """With the path and what to do; whether the ledger is new or was made before."""
    with tempfile.TemporaryDirectory() as name:  # not within pytest's folders, which only their owner may enter
        folder = Path(name)
        with Ledger(f"sqlite:///{folder / 'old.db'}"):
            pass
        (folder / "old.db").chmod(0o444)
        folder.chmod(0o555)
        new = run_apart("_open_and_say_why_not", f"sqlite:///{folder / 'new.db'}")
        old = run_apart("_open_and_say_why_not", f"sqlite:///{folder / 'old.db'}")
        folder.chmod(0o755)

    assert "unable to open database file. Make sure its folder exists and is writable for this user." in new
    assert f"{folder / 'old.db'} failed: attempt to write a readonly database. Make its folder writable" in old


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/db", "must start with sqlite:/// or postgresql://; given mysql"),
        ("ledger.db", "the ledger's URL `ledger.db` cannot be read"),
    ],
)
def test_a_wrong_url_is_told(url: str, message: str) -> None:
    """With what it must look like."""
    with pytest.raises(ConfigurationError) as caught:
        connect(url)

    assert message in str(caught.value)


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    """In no error."""
    with pytest.raises(LedgerUnavailableError) as caught:
        Ledger(f"postgresql://user:secret@/db?host={tmp_path}")

    assert "secret" not in str(caught.value)
    assert "connection" in str(caught.value)


def test_settings_choose_ledger_and_policy(tmp_path: Path) -> None:
    """The default is a file in the home folder, which is created; off is off; a server recovers what others left."""
    settings = load_settings({"ENGINEHOUSE_HOME": str(tmp_path / "home")})
    with open_ledger(settings) as ledger:
        ledger.reserve(Reservation("acme", "r1", "small", "b", TokenUsage(1, 0, 1)))
        ledger._commits.submit(Reservation("acme", "r2", "small", "b", TokenUsage(1, 0, 1))).result()
    with Ledger(f"sqlite:///{tmp_path / 'home' / 'ledger.db'}", owner="host/boot/1/1") as other:
        other.reserve(Reservation("acme", "r3", "small", "b", TokenUsage(1, 0, 1)))
    meter = open_meter(settings)
    assert isinstance(meter, LedgerMeter)
    assert meter.on_ledger_failure == "refuse"
    assert records(meter.ledger.database) == []  # this process lives, and only its own host can tell of another
    meter.close()

    assert isinstance(open_meter(Settings(tmp_path, accounting="off")), NoMeter)
    with pytest.raises(ConfigurationError, match="`ENGINEHOUSE_ON_LEDGER_FAILURE` must be refuse or serve"):
        load_settings({"ENGINEHOUSE_ON_LEDGER_FAILURE": "maybe"})


def test_a_server_starts_without_its_ledger_only_under_the_serving_policy(tmp_path: Path) -> None:
    """The other one says what is wrong."""
    missing = f"sqlite:///{tmp_path / 'missing' / 'ledger.db'}"
    with pytest.raises(LedgerUnavailableError, match="unable to open"):
        open_meter(Settings(tmp_path, ledger_url=missing))
    meter = open_meter(Settings(tmp_path, ledger_url=missing, on_ledger_failure="serve"))
    request = meter.open(tenant="acme", request_id="r1", model="small", build_id="b", upper_bound=TokenUsage(1, 0, 1))
    (tmp_path / "missing").mkdir()
    record = request.settle(TokenUsage(1, 0, 1), "stop")
    meter.close()

    assert record is not None
    assert record.amount is None
