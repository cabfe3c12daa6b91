"""A local Ray, a corpus and a storage for the runs of a module."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.jobs import REPOSITORY, Job, write_books
from tests.integration.nodes import Cluster


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty small books."""
    return write_books(tmp_path_factory.mktemp("books"), 20)


@pytest.fixture(scope="package")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A Ray head that stays up for all drivers that do not need one of their own: it takes eight seconds each time."""
    with Cluster() as cluster:
        cluster.add(n_cpus=2)
        yield cluster


@pytest.fixture(scope="package")
def undisturbed(corpus: Path, storage: Path, cluster: Cluster) -> Job:
    """A finished run of the usual settings, for others to be compared with."""
    job = Job(corpus, storage, "undisturbed", environment=cluster.environment)
    assert job.run() == 0, job.log.read_text()[-3000:]
    return job
