"""The corpus card: one page that tells what a corpus is made of, as Markdown and as HTML.

Both are rendered from the manifest and the blocks alone, and hold nothing that depends on time or place.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from model.tokenizer import Tokenizer
from rayjob.atomic import write_atomically
from rayjob.corpus.blocks import SPLITS, Manifest
from rayjob.corpus.lookup import find_window

SAMPLES = 10
SHOWN_SOURCES = 50
SHOWN_WARNINGS = 50
CARD_FILES = HTML_FILE, MARKDOWN_FILE = "corpus.html", "corpus.md"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th { text-align: left } th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd }
td:not(:first-child), th:not(:first-child) { text-align: right } pre { white-space: pre-wrap; background: #f6f6f6;
padding: 1rem } @media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } pre { background: #222 } }
"""


class Section(NamedTuple):
    """A heading with a table (its first row the header), lines, and texts to quote."""

    title: str
    table: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    quotes: Sequence[tuple[str, str]] = ()  # caption, text


def write_card(tokens_folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Writes corpus.md and corpus.html beside the blocks."""
    sections = list(_sections(tokens_folder, manifest, tokenizer))
    write_atomically(tokens_folder / MARKDOWN_FILE, _to_markdown(manifest.hash, sections).encode())
    write_atomically(tokens_folder / HTML_FILE, _to_html(manifest.hash, sections).encode())


def _sections(tokens_folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> Iterator[Section]:
    yield _counts(manifest)
    yield Section("Sides", _sides(manifest))
    yield Section("Settings", [("setting", "value"), *_settings(manifest)])
    yield _sources(manifest)
    yield Section("Bytes a row or document", _histogram(manifest.statistics.get("row_bytes", {})))
    removed = manifest.statistics.get("removed_lines", {})
    if removed:
        yield Section(
            "Most frequent removed lines", [("line", "times"), *((k, _number(n)) for k, n in removed.items())]
        )
    if manifest.warnings:
        more = len(manifest.warnings) - SHOWN_WARNINGS
        rest = [f"… and {more} more, all in manifest.json"] if more > 0 else []
        yield Section("Warnings", lines=[*manifest.warnings[:SHOWN_WARNINGS], *rest])
    yield Section("Sample windows of training", quotes=_samples(tokens_folder, manifest, tokenizer))


def _counts(manifest: Manifest) -> Section:
    totals = manifest.totals
    table = [("count", "value"), *((name, _number(count)) for name, count in totals.items())]
    ratio = sum(manifest.split(split).bytes for split in SPLITS) / max(1, totals["tokens"])
    return Section("Counts", [*table, ("bytes a token", f"{ratio:.3f}")])


def _sides(manifest: Manifest) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("side", "documents or runs of rows", "tokens", "windows", "bytes", "blocks")]
    for split in SPLITS:
        side = manifest.split(split)
        numbers = (side.documents, side.tokens, side.windows, side.bytes, len(side.blocks))
        table.append((split, *map(_number, numbers)))
    return table


def _settings(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield from ((f"origin {name}", value) for name, value in manifest.origin.items())
    yield from ((name, str(value)) for name, value in manifest.inputs.items() if name != "sources")


def _sources(manifest: Manifest) -> Section:
    names = [name for name in manifest.sources[0] if name != "sha256"]
    rows = [[_cell(source[name]) for name in names] for source in manifest.sources[:SHOWN_SOURCES]]
    more = len(manifest.sources) - SHOWN_SOURCES
    return Section("Sources", [names, *rows], [f"… and {more} more files, all in manifest.json"] if more > 0 else [])


def _histogram(counts: Mapping[str, int]) -> list[tuple[str, ...]]:
    most = max(counts.values(), default=1)
    bars = (("█" * round(30 * count / most) or "▏", count, size) for size, count in counts.items())
    return [("at most", "rows", ""), *((f"{int(size):,} bytes", _number(count), bar) for bar, count, size in bars)]


def _samples(tokens_folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    max_seq_len = manifest.totals["max_seq_len"]
    count = min(SAMPLES, manifest.train.windows)
    samples = []
    for window in (manifest.train.windows * place // count for place in range(count)):
        parts = find_window(tokens_folder, manifest, tokenizer, "train", window, max_seq_len)
        caption = f"window {window:,}: {', '.join(dict.fromkeys(part.doc_id for part in parts))}"
        samples.append((caption, "\n[…]\n".join(part.text for part in parts)))
    return samples


def _number(value: int) -> str:
    return f"{value:,}"


def _cell(value: object) -> str:
    return _number(value) if isinstance(value, int) else str(value)


def _to_markdown(name: str, sections: Sequence[Section]) -> str:
    lines = [f"# Corpus {name}"]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        for number, row in enumerate(section.table):
            lines.append("| " + " | ".join(_in_markdown(cell).replace("|", "\\|") for cell in row) + " |")
            if number == 0:
                lines.append("|---" + "|---:" * (len(row) - 1) + "|")
        lines += [f"- {_in_markdown(line)}" for line in section.lines]
        for caption, text in section.quotes:
            lines += ["", f"**{_in_markdown(caption)}**", "", *(f"    {line}" for line in text.split("\n"))]
    return "\n".join(lines) + "\n"


def _in_markdown(text: str) -> str:
    """Returns text on one line, without the beginning of a tag that a viewer would take for HTML."""
    return text.replace("<", "&lt;").replace("\n", " ")


def _to_html(name: str, sections: Sequence[Section]) -> str:
    title = html.escape(f"Corpus {name}")
    body = [f"<h1>{title}</h1>"]
    for section in sections:
        body.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.table:
            body.append(f"<table>{''.join(_html_rows(section.table))}</table>")
        if section.lines:
            body.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in section.lines) + "</ul>")
        for caption, text in section.quotes:
            body.append(f"<h3>{html.escape(caption)}</h3><pre>{html.escape(text)}</pre>")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>", ""])


def _html_rows(table: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(table):
        tag = "td" if number else "th"
        yield "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
