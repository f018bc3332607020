"""Handing outputs to their receivers, at the pace a receiver can take.

Every response costs its readers CPU time that the engine's forward passes need too (about 1.2 ms through a Triton
front door, all processes counted). So outputs of one sequence that are still waiting are merged into one, and after a
round the thread pauses so long that readers take a tenth of the machine: a few streams get each token by itself; many,
on few cores, get two or three at a time, and nothing falls behind. A sequence's first and last output never wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import RequestId, SequenceOutput

    OutputCallback = Callable[[SequenceOutput], None]

_LOGGER = logging.getLogger(__name__)

_READER_COST_S: Final = 0.0012  # CPU time of one response
_READERS_SHARE: Final = 0.1  # of the machine's CPU time


class Delivery:
    """A thread that calls each output's receiver in order; outputs of one sequence never overtake each other."""

    def __init__(self, on_receiver_failure: Callable[[RequestId], None], pause_s: float | None = None) -> None:
        self._on_receiver_failure = on_receiver_failure
        cores_s = _READERS_SHARE * (os.cpu_count() or 1)
        self._pause_s = _READER_COST_S / cores_s if pause_s is None else pause_s  # after each output
        self._started: set[tuple[RequestId, int]] = set()  # sequences whose first output was handed out
        self._urgent: set[tuple[RequestId, int]] = set()  # of those that wait
        self._waiting: dict[tuple[RequestId, int], tuple[OutputCallback, SequenceOutput]] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine-delivery", daemon=True)
        self._thread.start()

    def put(self, batch: list[tuple[OutputCallback, SequenceOutput]]) -> None:
        """Queue outputs, each merged into the one of its sequence that still waits."""
        with self._wake:
            for on_output, output in batch:
                key = (output.request_id, output.sequence_index)
                earlier = self._waiting.get(key)
                self._waiting[key] = (on_output, output if earlier is None else merge_outputs(earlier[1], output))
                if key not in self._started or output.finish_reason is not None:
                    self._urgent.add(key)
            self._wake.notify()

    def is_waiting(self, request_id: RequestId, sequence_index: int) -> bool:
        """Return whether an output of this sequence still waits; its next tokens may as well come with a later one."""
        return (request_id, sequence_index) in self._waiting

    def close(self) -> None:
        """Deliver what is queued and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        next_round_s = 0.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                self._wake.wait_for(lambda: self._urgent or self._closing, max(0.0, next_round_s - time.monotonic()))
                is_round = self._closing or time.monotonic() >= next_round_s
                keys = list(self._waiting) if is_round else list(self._urgent)
                batch = {key: self._waiting.pop(key) for key in keys}
                self._urgent.clear()
                if self._closing and not batch:
                    return
            for key, (on_output, output) in batch.items():
                self._started.add(key)
                if output.finish_reason is not None:
                    self._started.discard(key)
                try:
                    on_output(output)
                except Exception:
                    _LOGGER.exception("a receiver of request %s failed; cancelling it", output.request_id)
                    self._on_receiver_failure(output.request_id)
            next_round_s = max(next_round_s, time.monotonic()) + len(batch) * self._pause_s


def merge_outputs(earlier: SequenceOutput, later: SequenceOutput) -> SequenceOutput:
    """Return one output that says what *earlier* and then *later* say."""
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        log_probs=earlier.log_probs + later.log_probs,
        context_logits=_concatenate(earlier.context_logits, later.context_logits),
        generation_logits=_concatenate(earlier.generation_logits, later.generation_logits),
    )


def _concatenate(earlier: NDArray[np.float32] | None, later: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return np.concatenate([earlier, later])
