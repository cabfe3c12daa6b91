import sys
from pathlib import Path

import pytest

from cluster import head, processes
from cluster.settings import Settings, read_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = read_settings({"RAYJOB_STATE": str(tmp_path / "state")})
    settings = Settings(settings.state, tmp_path / "t", settings.node_ip, settings.ports)
    settings.state.mkdir()
    settings.temp.mkdir()
    return settings


def process(command: str, pid: int = 1) -> processes.Process:
    return processes.Process(pid, 1, "boot", 1, 1, command)


def test_head_is_complete_only_with_all_its_parts_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [process(f"/site-packages/ray/{path}", pid) for pid, path in enumerate(head.CORE)]
    dead: set[int] = set()
    monkeypatch.setattr(processes, "is_alive", lambda one: one.pid not in dead)
    assert head.is_complete(parts)
    assert not head.is_complete(parts[:-1])
    assert not head.is_complete([])
    dead.add(0)
    assert not head.is_complete(parts)


def test_ports_of_a_dead_head_are_not_taken_over(settings: Settings) -> None:
    processes.save_record(head.record_path(settings), [process("raylet/raylet", 2**22)], **head.facts_of(settings))
    assert head.running_ports(settings) == {}


def test_running_head_with_other_settings_is_refused(settings: Settings) -> None:
    head.check_same(settings, head.facts_of(settings))
    with pytest.raises(head.HeadError, match="node_ip is 10.0.0.5, not 127.0.0.1.*cluster/stop.sh"):
        head.check_same(settings, {**head.facts_of(settings), "node_ip": "10.0.0.5"})


def test_ray_sees_a_path_without_spaces(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/a b/.venv/bin/python")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "a b"))
    (tmp_path / "a b" / "bin").mkdir(parents=True)
    (tmp_path / "a b" / "bin" / "python").touch()
    for _ in range(2):  # the link of an earlier call is no obstacle
        path = head.ray_python(settings)
        assert " " not in path
        assert Path(path).exists()


def test_plain_path_is_used_as_it_is(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/ab/.venv/bin/python")
    assert head.ray_python(settings) == "/ab/.venv/bin/python"


def test_clearing_keeps_only_the_newest_logs(settings: Settings) -> None:
    for name in ("session_2026-01-01_1", "session_2026-01-02_1", "session_2026-01-03_1"):
        (settings.ray_temp / name / "logs").mkdir(parents=True)
    (settings.ray_temp / "ray_current_cluster").touch()
    head.clear(settings)
    assert [path.name for path in settings.ray_temp.iterdir()] == ["session_2026-01-03_1"]


def test_full_temporary_folder_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**20}))
    with pytest.raises(head.HeadError, match=f"{settings.temp} has 0.00 GiB free .* RAY_TMPDIR"):
        head.check_room(settings)
