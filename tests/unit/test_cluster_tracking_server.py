"""An MLflow server, a real one, whose store is damaged."""

from pathlib import Path

import pytest

from cluster import services, tracking_server
from cluster.settings import read_settings


def test_damaged_store_is_told_in_one_line_and_costs_the_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = read_settings({"RAYJOB_STATE": str(tmp_path / "state"), "RAY_TMPDIR": "/tmp", "MLFLOW_PORT": "65535"})
    settings.state.mkdir()
    store = tmp_path / "storage" / "mlflow" / "mlflow.db"
    store.parent.mkdir(parents=True)
    store.write_bytes(b"no database" * 500)
    tracking_server.launch(settings, tmp_path / "storage")
    services._await_tracking_server(settings)
    (line,) = capsys.readouterr().err.splitlines()
    assert "file is not a database" in line
    assert f"{store} is damaged, move it away" in line
    assert tracking_server.running_ports(settings) == {}
