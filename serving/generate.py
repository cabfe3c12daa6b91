"""Generates text from a checkpoint on the command line: the same text as the service for the same seed.

python -m serving.generate --checkpoint storage/runs/small --prompt "Once upon a time" --seed 7
python -m serving.generate --checkpoint storage/runs/small --interactive
python -m serving.generate --checkpoint storage/runs/small --prompts prompts.txt --n 4 --json > texts.jsonl
echo "Once upon a time" | python -m serving.generate --checkpoint storage/runs/small
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from model.complete import CheckpointError
from model.sampling import SamplingParams
from serving.console.conversation import Conversation
from serving.console.local_engine import LocalEngine
from serving.console.options import SAMPLING, Options, UsageError
from serving.console.printing import Texts, draw_seed, print_text
from serving.console.prompt_file import generate_all, read_prompts
from serving.engine.loading import load_served_model

MAX_SLOTS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 2 bad usage or checkpoint, 1 any other failure."""
    arguments = _parse(argv)
    try:
        options = _options(arguments)
        if "://" in arguments.checkpoint:
            raise UsageError(
                f"--checkpoint {arguments.checkpoint} must be a local checkpoint or run folder. Where the run was "
                "trained `python -m rayjob status` names its folder; elsewhere copy one first (aws s3 sync)."
            )
        prompts = [] if arguments.interactive else _prompts(arguments)
        num_slots = min(max(len(prompts), 1) * options.n, MAX_SLOTS)
        served = load_served_model(Path(arguments.checkpoint))
        engine = LocalEngine(served, num_slots=num_slots, max_waiting=num_slots + options.n)
        try:
            _run(engine, prompts, options, arguments)
        finally:
            engine.close()
    except (UsageError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serving.generate",
        description="Continue texts with a checkpoint's model. Without --prompt, --prompts or --interactive the "
        "prompt is read from a pipe.",
    )
    parser.add_argument("--checkpoint", required=True, help="a checkpoint or run folder (its best)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line, or .jsonl with a field prompt")
    source.add_argument("--interactive", action="store_true", help="read prompts and commands line by line until EOF")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each prompt")
    parser.add_argument("--n", type=int, default=1, help="texts for each prompt")
    parser.add_argument("--seed", type=int, help="same seed, same text; drawn and shown when absent")
    parser.add_argument("--max_new_tokens", type=int, help="default: the room left, at most 128")
    parser.add_argument("--stop", action="append", default=[], help="end a text before this string; may be repeated")
    _add_sampling(parser)
    arguments = parser.parse_args(argv)
    if arguments.interactive and arguments.json:
        parser.error("--json goes with --prompt, --prompts or a pipe, not with --interactive")
    return arguments


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    defaults = SamplingParams()
    about = {"temperature": "0 is greedy", "top_k": "0 is off", "top_p": "1 is off", "min_p": "0 is off"}
    for name in SAMPLING:
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=about.get(name))


def _options(arguments: argparse.Namespace) -> Options:
    """Checks every option before the model is loaded."""
    params = SamplingParams(**{name: getattr(arguments, name) for name in SAMPLING})
    stop = tuple(arguments.stop)
    options = Options(params, arguments.max_new_tokens, arguments.seed, arguments.n, stop)
    options.check()
    return options


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of the command line, a file or a pipe."""
    if arguments.prompts is not None:
        return read_prompts(arguments.prompts)
    if arguments.prompt is not None:
        return [arguments.prompt]
    if sys.stdin.isatty():
        raise UsageError("there is no prompt: give --prompt TEXT, --prompts FILE or --interactive, or pipe a text in")
    return [sys.stdin.read().removesuffix("\n")]


def _run(engine: LocalEngine, prompts: list[str], options: Options, arguments: argparse.Namespace) -> None:
    if arguments.interactive:
        Conversation(engine, options).run()
    elif arguments.prompts is not None:
        in_flight = max(MAX_SLOTS // options.n, 1)
        for prompt, seed, texts in generate_all(engine, prompts, options, in_flight=in_flight):
            print(texts.as_json(engine.served, prompt, seed) if arguments.json else texts.plain())
    elif arguments.json:
        [(prompt, seed, texts)] = generate_all(engine, prompts, options, in_flight=1)
        print(texts.as_json(engine.served, prompt, seed))
    else:
        _print_one(engine, prompts[0], options)


def _print_one(engine: LocalEngine, prompt: str, options: Options) -> None:
    seed = draw_seed(options)
    specs = options.specs(engine.served, prompt, seed)
    if options.seed is None:
        print(f"seed {seed}", file=sys.stderr)
    texts = Texts(options.n)
    print_text(engine.deltas(engine.submit(specs)), texts)


if __name__ == "__main__":
    sys.exit(main())
