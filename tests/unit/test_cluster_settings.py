import os
import stat
from pathlib import Path

import pytest

from cluster.settings import (
    DEFAULT_PORTS,
    LONGEST_TEMP_PATH,
    MARKER,
    SettingsError,
    auth_headers,
    forget_other_clusters,
    prepare_folders,
    process_environment,
    read_settings,
)


def test_ports_come_from_the_environment_then_from_what_runs_then_from_the_defaults() -> None:
    settings = read_settings({"RAY_PORT": "7001"}, {"RAY_PORT": 7002, "SERVE_PORT": 7003})
    assert settings.ports == {**DEFAULT_PORTS, "RAY_PORT": 7001, "SERVE_PORT": 7003}


@pytest.mark.parametrize("text", ["x", "0", "80", "65536", "-1", "8265 ", "٨٢٦٥"])
def test_wrong_port_is_named(text: str) -> None:
    with pytest.raises(SettingsError, match="^DASHBOARD_PORT="):
        read_settings({"DASHBOARD_PORT": text})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings({"SERVE_PORT": "no", "RAY_PORT": "5000"})
    assert "SERVE_PORT='no'" in str(caught.value)
    assert "MLFLOW_PORT and RAY_PORT are both 5000" in str(caught.value)


def test_temporary_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="RAY_TMPDIR"):
        read_settings({"RAY_TMPDIR": str(tmp_path / ("d" * LONGEST_TEMP_PATH))})


def test_each_state_folder_has_a_temporary_folder_of_its_own() -> None:
    one, two = (read_settings({"RAYJOB_STATE": state, "RAY_TMPDIR": "/t"}) for state in ("/a", "/b"))
    assert one.temp != two.temp
    assert one.temp.parent == Path("/t")


def test_only_the_owner_can_read_the_token_and_it_stays_the_same(tmp_path: Path) -> None:
    settings = read_settings({"RAYJOB_STATE": str(tmp_path / "state")})
    try:
        prepare_folders(settings)
        token = settings.token_path.read_text()
        prepare_folders(settings)
        assert settings.token_path.read_text() == token
        assert stat.S_IMODE(settings.token_path.stat().st_mode) == 0o600
        assert stat.S_IMODE(settings.state.stat().st_mode) == 0o700
        assert auth_headers(settings) == {"Authorization": f"Bearer {token}"}
    finally:
        settings.temp.rmdir()


def test_our_processes_are_marked_and_meet_no_other_cluster() -> None:
    settings = read_settings({"RAYJOB_STATE": "/a"})
    environment = process_environment(settings, {"RAY_ADDRESS": "10.0.0.1:1", "PATH": "/bin"}, "head")
    assert environment["RAY_ADDRESS"] == "127.0.0.1:6379"
    assert environment[MARKER] == f"{settings.temp}/head"
    assert environment["PATH"] == "/bin"


def test_tuning_by_the_user_is_kept_but_authentication_cannot_be_turned_off() -> None:
    settings = read_settings({"RAYJOB_STATE": "/a"})
    wishes = {"RAY_JOB_STOP_WAIT_TIME_S": "300", "RAY_AUTH_MODE": "disabled"}
    environment = process_environment(settings, wishes, "head")
    assert environment["RAY_JOB_STOP_WAIT_TIME_S"] == "300"
    assert environment["RAY_AUTH_MODE"] == "token"


def test_node_leaves_loopback_only_when_asked() -> None:
    loopback_only = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    closed, opened = read_settings({}), read_settings({"NODE_IP": "10.0.0.5"})
    assert process_environment(closed, {}, "head")[loopback_only] == "0"
    assert loopback_only not in process_environment(opened, {}, "head")


def test_address_of_another_cluster_is_dropped_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"RAY_ADDRESS": "10.9.9.9:1234", "HOME": os.sep}
    forget_other_clusters(environment)
    assert environment == {"HOME": os.sep}
    assert "RAY_ADDRESS=10.9.9.9:1234 is not used" in capsys.readouterr().out
