"""One local Ray for all integration tests of a session."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A real local Ray with two CPUs in a temporary folder of its own."""
    import ray

    # Ray's sockets lie under this folder and a socket's path may have 107 characters: not pytest's long one.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *_python_path()])}},
        )
        yield
        ray.shutdown()


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
