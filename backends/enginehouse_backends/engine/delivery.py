"""Handing outputs to their receivers, at the pace a receiver can take.

Every response costs its readers CPU time that the engine's forward passes need too (about 0.8 ms through a Triton
front door, all processes counted). So outputs of one sequence that are still waiting are merged into one, and after a
round the thread pauses for as long as its readers are assumed to need: at a few hundred tokens a second each token is
its own response; at thousands, responses carry several tokens and nothing falls behind.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import RequestId, SequenceOutput

    OutputCallback = Callable[[SequenceOutput], None]

_LOGGER = logging.getLogger(__name__)


class Delivery:
    """A thread that calls each output's receiver in order; outputs of one sequence never overtake each other."""

    def __init__(self, on_receiver_failure: Callable[[RequestId], None], reader_cost_s: float = 0.0008) -> None:
        self._on_receiver_failure = on_receiver_failure
        self._reader_cost_s = reader_cost_s
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
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closing)
                batch, self._waiting = self._waiting, {}
                closing = self._closing
            started_s = time.monotonic()
            for on_output, output in batch.values():
                try:
                    on_output(output)
                except Exception:
                    _LOGGER.exception("a receiver of request %s failed; cancelling it", output.request_id)
                    self._on_receiver_failure(output.request_id)
            if closing and not batch:
                return
            pause_s = len(batch) * self._reader_cost_s - (time.monotonic() - started_s)
            if pause_s > 0 and not closing:
                time.sleep(pause_s)


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
