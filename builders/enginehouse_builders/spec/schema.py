"""The spec's JSON Schema, for editors: ``python -m enginehouse_builders.spec.schema > docs/spec.schema.json``."""

from __future__ import annotations

import json
import sys

from enginehouse_builders.spec.model import Spec


def schema_text() -> str:
    """Return the schema (JSON Schema 2020-12) with sorted keys and a final newline."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Enginehouse spec",
        **Spec.model_json_schema(),
    }
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
