"""The YAML file of services: read, checked, sizes in bytes.

::

    memory_budget: 2GiB        # what all engines that are loaded may take together
    max_wait_s: 30             # how long a request waits for its engine to load
    idle_unload_s: 600         # optional: unload what was not used for so long
    services:
      chat:  {build: smollm2, pinned: true}
      coder: {build: "s3://engines/builds/coder", kv_memory: 512MiB}
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

_UNITS: Final = {"B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)?")
_DEFAULT_KV_BYTES: Final = 256 << 20


def parse_size(size: object) -> int:
    """Read a number of bytes, or text such as 2GiB; raise ValueError for anything else.

    >>> parse_size("1.5 KiB"), parse_size(20), parse_size("2GB")
    (1536, 20, 2000000000)
    """
    found = None if isinstance(size, bool) else _SIZE.fullmatch(str(size).strip())
    if found is None or (found[2] or "B") not in _UNITS:
        raise ValueError(f"must be a size such as 2GiB (units: {', '.join(_UNITS)}); given {size!r}")
    return int(float(found[1]) * _UNITS[found[2] or "B"])


_Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,31}$")]


class ServiceEntry(BaseModel):
    """One service: a build, and how it is served. ``memory`` overrides what the engine is planned to take."""

    model_config = ConfigDict(extra="forbid")

    build: str
    pinned: bool = False
    kv_memory: _Size = _DEFAULT_KV_BYTES
    memory: _Size | None = None
    parameters: dict[str, str] = Field(default_factory=dict)


class ServiceFile(BaseModel):
    """The whole file. ``grpc_url`` is the server's, where it was not started by `enginehouse serve`."""

    model_config = ConfigDict(extra="forbid")

    memory_budget: _Size
    max_wait_s: float = Field(30.0, gt=0)
    idle_unload_s: float | None = Field(None, gt=0)
    grpc_url: str | None = None
    services: dict[_Name, ServiceEntry]


def read_services(file: Path) -> ServiceFile:
    """Read the file; raise :class:`ConfigurationError` naming the first field that is wrong."""
    try:
        return ServiceFile.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is not UTF-8 text ({error}).") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file} is not YAML: {' '.join(str(error).split())}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(f"{file}: `{where}`: {first['msg'].removeprefix('Value error, ')}.") from error
