"""A byte-per-token vocabulary, and front doors over scripted engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.front_door import END_ID, FakeEngine
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from enginehouse_backends.admission.fair_queue import QueueLimits
from enginehouse_backends.front_door.door import DoorSettings, FrontDoor, Job
from enginehouse_backends.front_door.engine_client import generate, prompt_inputs
from enginehouse_backends.front_door.row_runner import RowRunner, TextOptions
from enginehouse_backends.tokenization.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def byte_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """One token per byte, in byte order, and <end> as 256."""
    alphabet = {character: index for index, character in enumerate(_bytes_to_unicode())}
    tokenizer = FastTokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    path: Path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return Vocabulary.from_tokenizer_json(path, 257)


@pytest.fixture
def open_door(byte_vocabulary: Vocabulary) -> Iterator[Callable[..., FrontDoor]]:
    """Open front doors over scripted engines, and close them."""
    doors = []

    def open_one(engine: FakeEngine, **settings: Any) -> FrontDoor:
        limits = QueueLimits(max_active=settings.pop("max_active", 4), max_waiting=settings.pop("max_waiting", 4))

        def run_row(door: FrontDoor, job: Job) -> None:
            inputs = {**job.row.engine_inputs, **prompt_inputs(job.prompt_token_ids, job.row.max_tokens)}
            deltas = generate(door.call_engine, "engine", inputs, request_id=job.engine_request_id, parameters={})
            RowRunner(job, byte_vocabulary, TextOptions(), END_ID).run(door, deltas)

        door = FrontDoor(DoorSettings(limits, **settings), engine, run_row)
        doors.append(door)
        return door

    yield open_one
    for door in doors:
        door.close()


def _bytes_to_unicode() -> list[str]:
    """GPT-2's printable stand-in of every byte, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte if byte in printable else next(extra)) for byte in range(256)]
