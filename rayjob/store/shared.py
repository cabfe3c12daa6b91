"""Workers on several nodes save one checkpoint together, so all must see the run's folder."""

import socket

from rayjob.config import JobConfig


def check_shared(config: JobConfig) -> None:
    """Called by every worker.

    Raises:
        RuntimeError: this worker's node does not see what the driver has written into the run's folder.
    """
    if (config.run_folder / "config.yaml").exists():
        return
    what = "RAYJOB_CACHE" if config.mirror else "`storage`"
    raise RuntimeError(
        f"{socket.gethostname()} does not see {config.run_folder}, which the driver has made: workers on several nodes "
        f"save into one folder. Put {what} on a file system that all nodes mount, or train on one node."
    )
