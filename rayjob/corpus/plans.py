"""From sources to units of work: whole documents are catalogued by the driver, rows by Ray tasks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from model.normalizer import Normalizer
from rayjob.config import DataConfig
from rayjob.corpus import demo, huggingface
from rayjob.corpus.catalog import Catalog, CatalogSettings, build_catalog
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.facts import CorpusFacts, document_facts, row_facts
from rayjob.corpus.row_catalog import build_row_catalog
from rayjob.corpus.row_units import plan_row_units
from rayjob.corpus.rows import inspect_files, plan_ranges
from rayjob.corpus.scan import ScanSettings, ensure_scanned
from rayjob.corpus.sources import ROW_SOURCES, Source, find_sources
from rayjob.corpus.units import AnyUnit, plan_units
from rayjob.store.publish import withdraw_folder


class Plan(NamedTuple):
    """The work to do and what is known of the corpus before it is tokenized."""

    units: list[AnyUnit]
    facts: CorpusFacts

    def of(self, split: str) -> list[AnyUnit]:
        return [unit for unit in self.units if unit.split == split]


def has_rows(data: DataConfig) -> bool:
    """Whether the sources are rows of Parquet rather than whole documents."""
    return data.source in ROW_SOURCES


def obtain_sources(data: DataConfig, storage: Path) -> tuple[Source, ...]:
    """The sources, downloaded first where they are to be.

    Raises:
        CorpusError: a download failed or a path leads nowhere.
    """
    if data.source == "demo":
        demo.fetch(storage)
    if data.source == "huggingface":
        huggingface.fetch(data.revision, storage)
    sources = find_sources(data, storage)
    if data.source == "huggingface":
        sha256s = {source.path: source.sha256 for source in sources}
        if huggingface.set_altered_aside(data.revision, storage, sha256s):
            huggingface.fetch(data.revision, storage)
            sources = find_sources(data, storage)
    return sources


@contextmanager
def unchanged_sources(
    data: DataConfig, storage: Path, sources: Sequence[Source], made: Sequence[Path]
) -> Iterator[None]:
    """Sees to it that the block has read the files that were hashed.

    Rows are read by place, so what stood meanwhile in a file that was exchanged would pass for the text that was
    hashed as soon as that is back: then `made`, the folders that the block fills, are removed.

    Raises:
        CorpusError: a file has changed or is gone.
    """
    try:
        yield
    except Exception:
        with suppress(CorpusError):
            _remove_if_changed(data, storage, sources, made)
        raise
    _remove_if_changed(data, storage, sources, made)


def _remove_if_changed(data: DataConfig, storage: Path, sources: Sequence[Source], made: Sequence[Path]) -> None:
    now = {source.name: source for source in find_sources(data, storage)}
    problems = [
        f"{source.path} changed while it was being prepared: run the same command again."
        for source in sources
        if now.get(source.name) != source
    ]
    if problems:
        for folder in made:
            withdraw_folder(folder)
        raise CorpusError(problems)


def origin(data: DataConfig, storage: Path) -> dict[str, str]:
    """Repository, revision and commit of a downloaded data set; empty for files."""
    pin = huggingface.read_pin(data.revision, storage) if data.source == "huggingface" else None
    return {"repo": pin.repo, "revision": pin.revision, "commit": pin.commit} if pin else {}


def normalizer_of(data: DataConfig) -> Normalizer:
    """The cleaning that the settings ask for."""
    return Normalizer(detokenize=data.detokenize, lowercase=data.lowercase)


def catalog_of(data: DataConfig, sources: tuple[Source, ...], cache: Path, is_cancelled: Callable[[], bool]) -> Catalog:
    """The catalog of whole documents; what was read of larger files is kept in `cache`.

    Raises:
        CorpusError: no text, or a file that is not what its suffix says.
        PrepareCancelled: the caller asked to stop.
    """
    settings = CatalogSettings(normalizer_of(data), data.text_column, data.dedup, data.val_fraction)
    return build_catalog(sources, settings, cache / "documents", is_cancelled)


def make_plan(data: DataConfig, sources: tuple[Source, ...], cache: Path, is_cancelled: Callable[[], bool]) -> Plan:
    """Reads the corpus once and decides what is kept and where it stands.

    Raises:
        CorpusError: what is wrong with the sources; all of it where that can be told at once.
        PrepareCancelled: the caller asked to stop.
    """
    if not has_rows(data):
        catalog = catalog_of(data, sources, cache, is_cancelled)
        units = [unit for split, stretches in catalog.splits().items() for unit in plan_units(split, stretches)]
        return Plan(list(units), document_facts(sources, catalog))
    files = inspect_files(sources, data.text_column, data.doc_column)
    ranges = [rows for source, file in zip(sources, files, strict=True) for rows in plan_ranges(source, file)]
    settings = ScanSettings(data.text_column, data.doc_column, data.lowercase, data.detokenize, str(cache / "scans"))
    ensure_scanned(ranges, settings, is_cancelled)
    row_catalog = build_row_catalog(ranges, settings, dedup=data.dedup, val_fraction=data.val_fraction)
    row_units = plan_row_units(row_catalog)
    return Plan(list(row_units), row_facts(sources, row_catalog, row_units))
