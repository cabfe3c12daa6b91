"""Small Parquet files of intermediate results, whole or absent, so that a restart does only what is missing."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayjob.atomic import write_atomically

FACTS_KEY = b"facts"


def write_part(path: Path, columns: dict[str, Any], facts: dict[str, Any]) -> None:
    """Writes columns of equal length, and a JSON object beside them, whole or not at all."""
    table = pa.table(columns).replace_schema_metadata({FACTS_KEY: json.dumps(facts).encode()})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=False)
    write_atomically(path, buffer.getvalue())


def read_part(path: Path) -> tuple[pa.Table, dict[str, Any]] | None:
    """The columns and facts of a part, or None if it is absent or damaged."""
    try:
        table = pq.read_table(io.BytesIO(path.read_bytes()))
        return table, json.loads(table.schema.metadata[FACTS_KEY])
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None
