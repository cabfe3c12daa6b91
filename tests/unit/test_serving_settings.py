"""user_config of the deployment."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serving import settings
from serving.settings import Settings, parse_settings


def test_only_a_checkpoint_is_needed(tmp_path: Path) -> None:
    assert parse_settings({"checkpoint": str(tmp_path)}) == Settings(tmp_path, None, 64, 256, "auto", None)


def test_a_relative_checkpoint_starts_at_the_repository() -> None:
    root = Path(settings.__file__).resolve().parent.parent
    assert parse_settings({"checkpoint": "storage/runs/small"}).checkpoint == root / "storage/runs/small"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"checkpoint": None}, "checkpoint"),
        ({"checkpoint": ""}, "checkpoint"),
        ({"checkpoint": "s3://bucket/run"}, "checkpoint"),
        ({"model_name": ""}, "model_name"),
        ({"num_slots": 0}, "num_slots"),
        ({"num_slots": True}, "num_slots"),
        ({"num_slots": 2.0}, "num_slots"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_waiting": 10_000}, "max_waiting"),
        ({"follow_interval_s": 0}, "follow_interval_s"),
        ({"follow_interval_s": True}, "follow_interval_s"),
        ({"follow_interval_s": float("nan")}, "follow_interval_s"),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": True}, "num_threads"),
        ({"checkpont": "x"}, "checkpoint"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        parse_settings({"checkpoint": "x", **change})


def test_all_problems_come_in_one_message() -> None:
    with pytest.raises(ValueError, match=r"num_slots.*max_waiting"):
        parse_settings({"checkpoint": "x", "num_slots": 0, "max_waiting": -1})


def test_the_shipped_file_binds_to_loopback_and_its_user_config_is_valid() -> None:
    path = Path(settings.__file__).with_name("config.yaml")
    config = yaml.safe_load(path.read_text())
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    parse_settings(deployment["user_config"])
    assert deployment["ray_actor_options"]["num_cpus"] < 1
