"""Small Parquet files of intermediate results, whole or absent, so that a restart does only what is missing."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayjob.atomic import write_atomically

FACTS_KEY = b"facts"
DIGEST_KEY = b"digest"  # of what the checksums of pages do not cover


def write_part(path: Path, columns: dict[str, Any], facts: dict[str, Any]) -> None:
    """Writes columns of equal length, and a JSON object beside them, whole or not at all."""
    table = pa.table(columns)
    content = json.dumps(facts).encode()
    metadata = {FACTS_KEY: content, DIGEST_KEY: _digest(table, content)}
    write_atomically(path, encode_table(table.replace_schema_metadata(metadata)))


def read_part(path: Path) -> tuple[pa.Table, dict[str, Any]] | None:
    """The columns and facts of a part, or None if it is absent or damaged."""
    try:
        table = decode_table(path.read_bytes())
        content = table.schema.metadata[FACTS_KEY]
        is_sound = table.schema.metadata[DIGEST_KEY] == _digest(table, content)
        return (table, json.loads(content)) if is_sound else None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None


def encode_table(table: pa.Table) -> bytes:
    """A table as a Parquet file in which a changed byte is noticed."""
    buffer = io.BytesIO()
    # Dictionary and statistics cost space and time and serve queries that nobody makes here.
    pq.write_table(
        *(table, buffer),
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    return buffer.getvalue()


def decode_table(content: bytes) -> pa.Table:
    """The table of a Parquet file.

    Raises:
        OSError, pyarrow.ArrowException: it is damaged.
    """
    return pq.read_table(io.BytesIO(content), page_checksum_verification=True)


def _digest(table: pa.Table, facts: bytes) -> bytes:
    shape = json.dumps([table.column_names, table.num_rows])
    return hashlib.sha256(shape.encode() + facts).hexdigest().encode()
