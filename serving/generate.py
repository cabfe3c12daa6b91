"""Generates text from a checkpoint on the command line: the same text as the service for the same seed.

python -m serving.generate --checkpoint storage/runs/small --prompt "Once upon a time" --seed 7
python -m serving.generate --checkpoint storage/runs/small --interactive
"""

import argparse
import secrets
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from model.complete import CheckpointError
from model.sampling import SamplingParams
from serving.engine.context import fit_prompt
from serving.engine.loading import ServedModel, load_served_model
from serving.engine.sequence import SequenceSpec, decode_sequence

MAX_SEED = 2**63 - 1


class UsageError(ValueError):
    """The command line asks for something that cannot be done; nothing was generated."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 2 bad usage or checkpoint, 1 any other failure."""
    arguments = _parse(argv)
    try:
        params = _sampling_params(arguments)
        if "://" in arguments.checkpoint:
            raise UsageError(
                f"--checkpoint {arguments.checkpoint} must be a local checkpoint or run folder. Where the run was "
                "trained `python -m rayjob status` names its folder; elsewhere copy one first (aws s3 sync)."
            )
        served = load_served_model(Path(arguments.checkpoint))
        if arguments.interactive:
            _converse(served, params, arguments)
        else:
            _generate(served, arguments.prompt, params, arguments)
    except (UsageError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serving.generate", description=_summary())
    defaults = SamplingParams()
    parser.add_argument("--checkpoint", required=True, help="a checkpoint or run folder (its best)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue")
    source.add_argument("--interactive", action="store_true", help="read prompts line by line until EOF")
    parser.add_argument("--max_new_tokens", type=int, help="default: the room left, at most 128")
    parser.add_argument("--temperature", type=float, default=defaults.temperature, help="0 is greedy")
    parser.add_argument("--top_k", type=int, default=defaults.top_k, help="0 is off")
    parser.add_argument("--top_p", type=float, default=defaults.top_p, help="1 is off")
    parser.add_argument("--repetition_penalty", type=float, default=defaults.repetition_penalty)
    parser.add_argument("--seed", type=int, help="same seed, same text; drawn and shown when absent")
    return parser.parse_args(argv)


def _summary() -> str:
    return "Continue a text with a checkpoint's model."


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Checks every option before the model is loaded."""
    names = [field.name for field in fields(SamplingParams) if hasattr(arguments, field.name)]
    params = SamplingParams(**{name: getattr(arguments, name) for name in names})
    problems = params.problems()
    if arguments.max_new_tokens is not None and arguments.max_new_tokens < 1:
        problems.append(f"max_new_tokens must be at least 1, got {arguments.max_new_tokens}")
    if arguments.seed is not None and not 0 <= arguments.seed <= MAX_SEED:
        problems.append(f"seed must be in 0..{MAX_SEED}, got {arguments.seed}")
    if problems:
        raise UsageError("; ".join(problems))
    return params


def _converse(served: ServedModel, params: SamplingParams, arguments: argparse.Namespace) -> None:
    print("One prompt a line; end with Ctrl-D.", file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            return
        try:
            _generate(served, prompt, params, arguments)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)


def _generate(served: ServedModel, prompt: str, params: SamplingParams, arguments: argparse.Namespace) -> None:
    """Prints the continuation as it comes."""
    seed = secrets.randbits(63) if arguments.seed is None else arguments.seed
    spec = _spec(served, prompt, params, arguments.max_new_tokens, seed)
    if arguments.seed is None:
        print(f"seed {seed}", file=sys.stderr)
    for delta in decode_sequence(served, spec):
        print(delta.text, end="", flush=True)
    print()


def _spec(
    served: ServedModel, prompt: str, params: SamplingParams, max_new_tokens: int | None, seed: int
) -> SequenceSpec:
    tokens = served.tokenizer.encode_prompt(prompt)
    if not tokens:
        raise UsageError("the prompt is empty: give at least one character")
    try:
        fitted = fit_prompt(tokens, max_new_tokens, served.max_seq_len)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return SequenceSpec(fitted.tokens, fitted.max_new_tokens, seed, params=params)


if __name__ == "__main__":
    sys.exit(main())
