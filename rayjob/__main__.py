"""Command line of the job: python -m rayjob COMMAND --config FILE [KEY=VALUE …]

Exit codes: 0 done; 2 bad usage or configuration, nothing started; 3 stopped on request, run again to go on; 1 any
other failure.
"""

import argparse
import errno
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

from model.complete import CheckpointError
from rayjob.config import ConfigError, JobConfig
from rayjob.config_file import load_config
from rayjob.corpus.errors import CorpusError, PrepareCancelled
from rayjob.lease import reserve
from rayjob.lock import LockedError
from rayjob.store.errors import StoreError

DONE, FAILED, BAD_USAGE, STOPPED = 0, 1, 2, 3
_WORK = ("prepare", "train", "run")
_SAME_REQUEST_S = 1.0  # between two Ctrl-C that are one: a terminal and a wrapper both pass it on
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR}

logger = logging.getLogger("rayjob")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        code = _show_windows(args) if args.command == "show-window" else _run(args, _load_config(args, args.words))
        sys.stdout.flush()
        return code
    except (ConfigError, CorpusError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return BAD_USAGE
    except StoreError as error:
        logger.error("%s What is finished stays here; run the same command again to go on.", error)
        return FAILED
    except BrokenPipeError:
        if args.command in _WORK:  # it may be a connection's, and an end of a run is never silent
            raise
        # `… | head` has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at the end fails too
        return FAILED
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        logger.error("%s. Every file of a run is written under `storage`: make room, or choose another folder.", error)
        return FAILED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; words may stand anywhere among the options, which argparse alone refuses."""
    parser = _parser()
    args, left = parser.parse_known_args(arguments)
    if unknown := [word for word in left if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.words += left
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rayjob", description="Pretrain a Llama-style language model on Ray."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("prepare", "corpus -> tokenizer -> Parquet blocks"),
        ("train", "train from the blocks; the same call resumes"),
        ("run", "prepare, train, evaluate the best checkpoint"),
        ("status", "where the run stands"),
        ("plan", "parameters, steps, time and cost, before money is spent"),
        ("profile", "where the time of a step goes: a trace and the dearest operators, without Ray"),
        ("eval", "evaluate a checkpoint"),
        ("show-config", "the resolved configuration"),
        ("show-window", "the documents and the text of training windows, by id"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--config", type=Path, metavar="FILE", help="YAML; see rayjob/configs/")
        if name == "show-window":
            command.add_argument("words", nargs="+", metavar="ID", help="window ids, and KEY=VALUE as elsewhere")
            command.add_argument("--split", choices=("train", "val"), default="train", help="side of the corpus")
        else:
            command.add_argument("words", nargs="*", metavar="KEY=VALUE", help="dotted key and YAML value")
        if name in ("status", "plan", "profile", "show-config", "show-window"):
            command.add_argument("--json", action="store_true", help="one JSON object on one line")
        if name == "eval":
            command.add_argument(
                "--checkpoint", required=True, metavar="DIR", help="checkpoint or run folder, here or under s3://"
            )
            command.add_argument(
                "--text", type=Path, nargs="+", metavar="PATH", help="text files instead of validation"
            )
    return parser


def _load_config(args: argparse.Namespace, overrides: Sequence[str]) -> JobConfig:
    """Returns the configuration; a storage in an object store that cannot be used is found here, before any work."""
    config = load_config(args.config, overrides)
    if config.mirror and args.command != "show-config":
        from rayjob.store.s3 import storage_problems

        if problems := storage_problems(config.storage, to_write=args.command in _WORK):
            raise ConfigError(problems)
    return config


def _run(args: argparse.Namespace, config: JobConfig) -> int:
    if args.command in _WORK:
        return _work(args.command, config)
    if args.command == "eval":
        return _eval(args, config)
    _inspect(args, config)
    return DONE


def _inspect(args: argparse.Namespace, config: JobConfig) -> None:
    """Prints what can be said without starting Ray."""
    if args.command == "plan":
        from rayjob.plan import make_plan, render_plan

        plan = make_plan(config)
        print(json.dumps(plan) if args.json else render_plan(plan))
    elif args.command == "profile":
        from rayjob.profile import profile_steps, render_profile

        found = profile_steps(config)
        print(json.dumps(found.to_json()) if args.json else render_profile(found))
    elif args.command == "status":
        from rayjob.status import read_status

        _print_tree(read_status(config), args.json)
    else:
        from rayjob.commands import show_config

        _print_tree(show_config(config), args.json)


def _print_tree(tree: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(tree) if as_json else yaml.safe_dump(tree, sort_keys=False), end="\n" if as_json else "")


def _eval(args: argparse.Namespace, config: JobConfig) -> int:
    from rayjob.commands import evaluate
    from rayjob.store.checkpoints import local_checkpoint

    checkpoint = local_checkpoint(args.checkpoint, config.storage)
    print(json.dumps(evaluate(config, checkpoint, args.text).to_json()))
    return DONE


def _show_windows(args: argparse.Namespace) -> int:
    from rayjob.commands import show_windows
    from rayjob.corpus.blocks import BlocksError

    config = _load_config(args, [argument for argument in args.words if "=" in argument])
    ids = [argument for argument in args.words if "=" not in argument]
    if wrong := [argument for argument in ids if not argument.isascii() or not argument.isdigit()]:
        raise ConfigError([f"{argument!r} is no window id: expected a whole number." for argument in wrong])
    try:
        windows = show_windows(config, args.split, [int(argument) for argument in ids])
    except BlocksError as error:
        raise ConfigError([str(error)]) from error
    if args.json:
        print(json.dumps({"windows": windows}))
        return DONE
    for window in windows:
        for part in window["parts"]:
            place = f"{part['block']}, {part['tokens']} tokens from {part['first_token']}"
            print(f"== window {window['window']} | {part['doc_id']} | {place}\n{part['text']}")
    return DONE


def _work(command: str, config: JobConfig) -> int:
    """Runs a command that may take hours: it can be stopped, and its faults become one message."""
    stop = _stop_on_signals()  # before the imports below, which take seconds
    if command == "prepare":
        return _do(command, config, stop)
    try:
        with reserve(config.run_folder, f"run {config.run_name}"):
            return _do(command, config, stop)
    except LockedError as error:
        print(error, file=sys.stderr)
        return BAD_USAGE


def _do(command: str, config: JobConfig, stop: threading.Event) -> int:
    """Runs the command with all that it needs, and returns its exit code."""
    gc.disable()  # imports make a million objects to stay: looking for cycles among them takes a quarter of their time
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    from rayjob import commands
    from rayjob.connection import ConnectCancelled
    from rayjob.lock import WaitCancelled
    from rayjob.training.failure import RunFailedError
    from rayjob.training.job import Outcome

    gc.enable()
    try:
        outcome = {"prepare": commands.prepare, "train": commands.train, "run": commands.run}[command](config, stop)
    except (ConnectCancelled, PrepareCancelled, WaitCancelled) as error:
        logger.warning("%s Run the same command again to go on.", error)
        return STOPPED
    except KeyboardInterrupt:
        logger.error("interrupted without waiting for a save: the next start goes on from the newest checkpoint.")
        return FAILED
    except (RunFailedError, TrainingFailedError) as error:
        logger.error("training failed: %s", error)
        return FAILED
    except RayActorError as error:  # of Ray Train's controller, which nothing brings back within a driver
        logger.error("training was cut short, the same command goes on from the last checkpoint: %s", error)
        return FAILED
    if outcome is Outcome.STOPPED:
        logger.warning("stopped on request: run the same command again to go on.")
        return STOPPED
    if outcome is Outcome.BUDGET:
        logger.warning("cost.max_usd=%s is spent and a checkpoint saved: raise it to go on.", config.cost.max_usd)
    return DONE


def _stop_on_signals() -> threading.Event:
    """Returns an event that SIGTERM and Ctrl-C set; a second Ctrl-C interrupts at once."""
    stop = threading.Event()
    stopped_at_s = 0.0

    def request(number: int, _frame: FrameType | None) -> None:
        nonlocal stopped_at_s
        if not stop.is_set():
            stopped_at_s = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - stopped_at_s > _SAME_REQUEST_S:
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request)
    return stop


def _leave(exit_code: int) -> NoReturn:
    """Ends the process; at once if fit() was left waiting, for Ray can crash when it is shut down under a thread."""
    job = sys.modules.get("rayjob.training.job")  # only commands that train import it
    if job and job.is_fit_running():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    gc.freeze()  # for the same reason as above: the interpreter's last look for cycles takes more than a second
    sys.exit(exit_code)


if __name__ == "__main__":
    _leave(main())
