"""An S3 server of this machine, for tests: real HTTP, real signatures, nothing in the cloud."""

from __future__ import annotations

import json
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec
from moto.server import ThreadedMotoServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


@dataclass(frozen=True)
class S3Server:
    """A running server with the bucket ``engines``."""

    endpoint: str
    bucket: str = "engines"

    @property
    def url(self) -> str:
        """A store's URL."""
        return f"s3://{self.bucket}/builds"

    @property
    def filesystem(self) -> Any:
        """Fsspec's view of it, for looking and for harming."""
        return fsspec.filesystem("s3", endpoint_url=self.endpoint, use_listings_cache=False)

    def check_credentials(self) -> None:
        """Refuse every further request of an unknown account."""
        self.post("reset-auth", b"0")

    def post(self, action: str, data: bytes = b"") -> None:
        """Call the server's own interface for tests."""
        url, headers = f"{self.endpoint}/moto-api/{action}", {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, data=data, method="POST", headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 - our own server
            assert json.load(response)["status"] == "ok"


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Run a server, and point this process's and its children's S3 clients at it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        running = S3Server(f"http://{host}:{port}")
        for name, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": running.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # its key does not hold the endpoint
        running.post("reset")
        running.post("reset-auth", b"inf")
        running.filesystem.mkdir(running.bucket)
        yield running
    finally:
        server.stop()
