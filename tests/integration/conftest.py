"""One local Ray for all integration tests of a session."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A real local Ray with two CPUs, in a temporary folder of its own and without authentication."""
    with (
        pytest.MonkeyPatch.context() as patch,
        # Ray's sockets lie under this folder and a socket's path is at most 107 characters: not pytest's own.
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
    ):
        patch.setenv("RAY_AUTH_MODE", "disabled")  # the other mode writes a token into the home directory
        import ray

        environment = {"env_vars": {"PYTHONPATH": str(REPOSITORY)}}
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env=environment,
        )
        yield
        ray.shutdown()
