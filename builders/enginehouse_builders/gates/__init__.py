"""Gates: what a build must pass before promotion, and the records of it.

Promotion asks one question: ``latest_record(home, build_id, host_kind)`` and its ``passed``.
"""

from enginehouse_builders.gates.host import Gpu, Host, describe_host
from enginehouse_builders.gates.record import GATES, GateRecord, GateResult
from enginehouse_builders.gates.records import latest_record, read_records, write_record

__all__ = [
    "GATES",
    "GateRecord",
    "GateResult",
    "Gpu",
    "Host",
    "describe_host",
    "latest_record",
    "read_records",
    "write_record",
]
