"""Turns a preemption notice into a drain of this machine's Ray node, so that the job saves before the machine goes.

    python -m cluster.spot [--grace-s SECONDS]

1. Find this machine's raylet, which knows the node's id and the head's address.
2. Wait for a notice: SIGTERM to this process, or one from the metadata server of AWS or Google Cloud. Where there
   is no such server, and no notice, nothing is printed.
3. Ask the head to drain the node: Ray Train then sees the preemption, and its workers save.

AWS_EC2_METADATA_SERVICE_ENDPOINT and GCE_METADATA_HOST name other metadata servers, as they do for the clouds' own
tools.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import SimpleQueue
from types import FrameType

from cluster import processes
from cluster.settings import Settings, SettingsError, read_settings

POLL_S = 2.0
UNREACHABLE_POLL_S = 60.0  # most machines have no such server, and never get one
REQUEST_TIMEOUT_S = 2.0
LONG_POLL_S = 30  # how long Google's server may hold a request until the value changes
GOOGLE_GRACE_S = 30.0  # what Google Cloud gives between notice and end
TERM_GRACE_S = 30.0  # what Kubernetes gives between SIGTERM and SIGKILL, unless told otherwise
DRAIN_TIMEOUT_S = 30.0


class SpotError(Exception):
    """Why a notice cannot be passed on, and what to do."""


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine goes away, `grace_s` from now as far as is known."""

    source: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Node:
    """A Ray node of this machine: its id, where its head is, and the Ray variables that it was started with."""

    node_id: str
    head_address: str
    variables: tuple[tuple[str, str], ...] = ()


def request(url: str, headers: Mapping[str, str], *, method: str = "GET", timeout_s: float = REQUEST_TIMEOUT_S) -> str:
    """Returns the answer's text.

    Raises:
        OSError: no server, no answer in time or none of HTTP, or a status other than 200; HTTPError for the last.
    """
    # Metadata servers are on the link: a proxy would answer for another machine, if at all.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    call = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with opener.open(call, timeout=timeout_s) as response:
            return str(response.read(65536).decode(errors="replace"))
    except http.client.HTTPException as error:  # something else listens there; urllib passes these on as they are
        raise OSError(f"{url} does not answer as a web server does: {error!r}") from error


def aws_notice(base_url: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Notice | None:
    """Returns the notice that AWS has for this machine, if any.

    Raises:
        OSError: there is no such server here.
        ValueError: it answers something else.
    """
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = request(f"{base_url}/latest/api/token", lifetime, method="PUT")
    try:
        headers = {"X-aws-ec2-metadata-token": token}
        action = json.loads(request(f"{base_url}/latest/meta-data/spot/instance-action", headers))
    except urllib.error.HTTPError as error:
        if error.code == 404:  # its way of saying that there is no notice
            return None
        raise
    if not isinstance(action, dict) or "time" not in action:
        raise ValueError(f"{base_url} answers {action!r}, which is no instance action.")
    ends_at = datetime.fromisoformat(str(action["time"]).replace("Z", "+00:00"))
    if ends_at.tzinfo is None:  # AWS's times are in UTC, and one that does not say so must not cost the notice
        ends_at = ends_at.replace(tzinfo=UTC)
    return Notice(f"AWS ({action.get('action', 'end')} at {action['time']})", (ends_at - now()).total_seconds())


def google_notice(base_url: str) -> Notice | None:
    """Returns the notice that Google Cloud has for this machine, after waiting for one.

    Raises:
        OSError: there is no such server here.
    """
    url, headers = f"{base_url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
    # First without waiting, so that no server is found out in time, and so that no change is missed in between.
    if request(url, headers).strip() == "TRUE":
        return Notice("Google Cloud", GOOGLE_GRACE_S)
    waiting = f"{url}?wait_for_change=true&timeout_sec={LONG_POLL_S}"
    answer = request(waiting, headers, timeout_s=LONG_POLL_S + REQUEST_TIMEOUT_S)
    return Notice("Google Cloud", GOOGLE_GRACE_S) if answer.strip() == "TRUE" else None


def watch(ask: Callable[[], Notice | None], on_notice: Callable[[Notice], None], stop: threading.Event) -> None:
    """Asks until there is a notice, which it hands on, or until `stop` is set."""
    pause_s = UNREACHABLE_POLL_S
    while not stop.is_set():
        try:
            notice = ask()
        # No such cloud here, a server that is not what it seems, or one missed call.
        except (OSError, ValueError, RecursionError):
            notice = None
        else:
            pause_s = POLL_S
        if notice:
            on_notice(notice)
            return
        stop.wait(pause_s)


def watch_clouds(environment: Mapping[str, str], on_notice: Callable[[Notice], None]) -> threading.Event:
    """Asks the metadata servers from threads of their own until the returned event is set."""
    stop = threading.Event()
    aws, google = metadata_servers(environment)
    for ask in (lambda: aws_notice(aws), lambda: google_notice(google)):
        threading.Thread(target=watch, args=(ask, on_notice, stop), name="spot", daemon=True).start()
    return stop


def metadata_servers(environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns the base addresses of the metadata servers of AWS and of Google Cloud."""
    aws = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
    google = environment.get("GCE_METADATA_HOST") or "metadata.google.internal"
    return aws.rstrip("/"), f"http://{google.rstrip('/')}"


def await_notice(environment: Mapping[str, str], term_grace_s: float) -> Notice:
    """Returns the first notice, from whichever source. Call it in the main thread, for it handles SIGTERM."""
    notices: SimpleQueue[Notice] = SimpleQueue()

    def terminate(_number: int, _frame: FrameType | None) -> None:
        notices.put(Notice("SIGTERM", term_grace_s))

    signal.signal(signal.SIGTERM, terminate)
    stop = watch_clouds(environment, notices.put)
    try:
        return notices.get()
    finally:
        stop.set()


def find_node(settings: Settings) -> Node:
    """Returns this machine's node of this folder's cluster or, if it has none, the one that there is.

    Raises:
        SpotError: there is none, or more than one.
    """
    seen = [one for one in processes.all_processes().values() if "raylet/raylet" in one.command.partition(" ")[0]]
    ours = [one for one in seen if processes.carries_marker(one.pid, settings.marker("head"))]
    nodes = [node for raylet in ours or seen if (node := read_node(raylet))]
    if len(nodes) != 1:
        found = ", ".join(sorted(node.node_id for node in nodes)) or "none"
        raise SpotError(f"expected one Ray node on this machine, found {found}: start one with cluster/worker.sh.")
    return nodes[0]


def read_node(raylet: processes.Process) -> Node | None:
    """Returns the node that a raylet is: Ray's own tools read the same options from its command line."""
    node_id = re.search(r"--node_id=([0-9a-f]+)", raylet.command)
    address = re.search(r"--gcs-address=(\S+)", raylet.command)
    if not (node_id and address):
        return None
    # The token and how loopback is treated: whoever talks to the head must have them as its nodes do.
    environment = processes.environment_of(raylet.pid)
    ray = tuple((name, value) for name, value in environment.items() if name.startswith("RAY_"))
    return Node(node_id[1], address[1], ray)


def drain(node: Node, notice: Notice) -> None:
    """Asks the head to drain the node until the notice's grace is over.

    Raises:
        SpotError: the head did not accept it.
    """
    command, variables = drain_command(node, notice), {**os.environ, **dict(node.variables)}
    try:
        finished = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DRAIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SpotError(f"the head at {node.head_address} did not answer within {DRAIN_TIMEOUT_S:.0f} s.") from None
    if finished.returncode != 0:
        raise SpotError(f"the node was not drained: {(finished.stderr or finished.stdout).strip()[-2000:]}")


def drain_command(node: Node, notice: Notice) -> list[str]:
    """Returns Ray's command that drains the node."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
        *("--address", node.head_address),
        *("--node-id", node.node_id),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION"),
        *("--reason-message", f"preemption notice from {notice.source}"),
        *("--deadline-remaining-seconds", str(max(1, math.floor(notice.grace_s)))),
    ]


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}.")


def main(arguments: Sequence[str]) -> int:
    """Waits for a notice, drains the node, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.spot", description="Drain this node on a spot notice.")
    parser.add_argument("--grace-s", type=_seconds, default=TERM_GRACE_S, help="from SIGTERM to the end (default: 30)")
    args = parser.parse_args(arguments)
    try:
        node = find_node(read_settings(os.environ))
        notice = await_notice(os.environ, args.grace_s)
        noticed_at_s = time.monotonic()
        print(f"Preemption notice from {notice.source}: {notice.grace_s:.0f} s left. Draining the node.", flush=True)
        drain(node, notice)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SpotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"The node is draining, {time.monotonic() - noticed_at_s:.1f} s after the notice.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
