"""The Python client of an Enginehouse server: typed requests, results and errors over tritonclient's protocols.

>>> from enginehouse_client import Client
>>> with Client("127.0.0.1:8001") as client:  # doctest: +SKIP
...     for chunk in client.generate_stream("The capital of France is", max_tokens=8):
...         print(chunk.text, end="")
"""

from enginehouse_client._client import AsyncClient, Client
from enginehouse_client._request import FRONT_DOOR, GenerationOptions, Message
from enginehouse_client._results import (
    Cost,
    Energy,
    GeneratedSequence,
    GenerationChunk,
    GenerationResult,
    ModelState,
    Usage,
)
from enginehouse_client._transport import AsyncTransport, Deadline, Transport

__all__ = [
    "FRONT_DOOR",
    "AsyncClient",
    "AsyncTransport",
    "Client",
    "Cost",
    "Deadline",
    "Energy",
    "GeneratedSequence",
    "GenerationChunk",
    "GenerationOptions",
    "GenerationResult",
    "Message",
    "ModelState",
    "Transport",
    "Usage",
]
