import errno
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import install


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose environment is a fake: making one and filling it are only noted in `calls.txt`."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(install, "REPOSITORY", tmp_path)

    def make(environment: Path) -> None:
        environment.mkdir(exist_ok=True)
        with (tmp_path / "calls.txt").open("a") as file:
            file.write("make\n")

    def fill(environment: Path, extras: list[str], log: Path) -> None:
        with (tmp_path / "calls.txt").open("a") as file:
            file.write(f"install {','.join(extras)}\n")

    monkeypatch.setattr(install, "make_environment", make)
    monkeypatch.setattr(install, "pip_install", fill)
    return tmp_path


def calls(repository: Path) -> list[str]:
    path = repository / "calls.txt"
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def test_second_install_does_nothing(repository: Path) -> None:
    install.install([])
    assert calls(repository) == ["make", "install "]
    install.install([])
    assert calls(repository) == []


def test_changed_project_is_installed_into_the_same_environment(repository: Path) -> None:
    install.install([])
    calls(repository)
    (repository / "pyproject.toml").write_text("[project]\nversion = '2'\n")
    install.install([])
    assert calls(repository) == ["install "]


def test_extras_add_up_and_fewer_are_no_reason_to_install(repository: Path) -> None:
    install.install([])
    install.install(["test"])
    install.install(["wandb"])
    assert calls(repository)[1:] == ["install ", "install test", "install test,wandb"]
    install.install(["test"])
    install.install([])
    assert calls(repository) == []


def test_interrupted_install_is_made_anew(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(install, "pip_install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            install.install([])
    calls(repository)
    install.install([])
    assert calls(repository) == ["make", "install "]


@pytest.mark.parametrize("name", ["base_prefix", "implementation"])
def test_another_python_gets_an_environment_of_its_own(
    repository: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install.install([])
    calls(repository)
    other = "/elsewhere" if name == "base_prefix" else SimpleNamespace(cache_tag="cpython-399")
    monkeypatch.setattr(install.sys, name, other)
    install.install([])
    assert calls(repository) == ["make", "install "]


def test_moved_repository_gets_a_new_environment(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    install.install([])
    moved = tmp_path_factory.mktemp("moved") / "here"
    shutil.copytree(repository, moved)
    monkeypatch.setattr(install, "REPOSITORY", moved)
    calls(repository)
    install.install([])
    assert calls(repository) == ["make", "install "]


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_damaged_stamp_is_no_stamp(repository: Path, text: str) -> None:
    install.install([])
    calls(repository)
    (repository / ".venv" / install.STAMP).write_text(text)
    install.install([])
    assert calls(repository) == ["make", "install "]


def test_full_disk_is_named_before_anything_is_made(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**28))
    with pytest.raises(install.InstallError, match=r"0\.2 GiB free, 3 GiB are needed"):
        install.install([])
    assert calls(repository) == []


def test_missing_venv_module_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(install.InstallError, match=r"apt-get install python3\.\d+-venv"):
        install.check_python()


def test_unusable_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(install.tempfile, "gettempdir", none_usable)
    with pytest.raises(install.InstallError, match="TMPDIR"):
        install.check_temporary_folder()


def test_failure_of_pip_shows_the_end_of_its_log(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "install.log"
    log.write_text("first\n" + "line\n" * 50 + "ERROR: [Errno 28] No space left on device\n\n")
    message = install.explain(log)
    assert "first" not in message
    assert str(log) in message
    assert "is full: free some space" in message


def test_waiting_tells_how_far_pip_is_and_returns_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "PROGRESS_INTERVAL_S", 0.01)
    # Ends when its input is closed, which is done at the first line of progress.
    process = subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE)

    def current_phase(log: Path) -> str:
        assert process.stdin is not None
        process.stdin.close()
        return "Collecting torch"

    monkeypatch.setattr(install, "current_phase", current_phase)
    assert install.wait_with_progress(process, tmp_path / "install.log") == 7
    assert "Collecting torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "phase"),
    [
        ("", "starting"),
        ("Collecting torch==2.13.0 (from rayjob)\n  Downloading torch.whl\n", "Collecting torch==2.13.0"),
        ("Collecting a\nInstalling collected packages: a, b\n  Attempting c\n", "Installing collected packages"),
    ],
)
def test_phase_is_the_last_that_pip_announced(tmp_path: Path, log: str, phase: str) -> None:
    (tmp_path / "install.log").write_text(log)
    assert install.current_phase(tmp_path / "install.log") == phase
