"""`--prompts FILE`: all prompts of a file, decoded together, their texts in the file's order."""

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from serving.console.local_engine import LocalEngine
from serving.console.options import Options, UsageError
from serving.console.printing import Texts, draw_seed
from serving.engine.engine import RequestStream
from serving.engine.sequence import SequenceSpec


class FinishedPrompt(NamedTuple):
    """A prompt of the file, the seed it drew, and its texts."""

    prompt: str
    seed: int
    texts: Texts


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts of a file: its lines, or `prompt` of each line of a .jsonl; empty lines are passed over.

    Raises:
        UsageError: The file cannot be read, or a line has no prompt; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a UTF-8 text file: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UsageError(f"{path} has no prompts: write one a line")
    if path.suffix == ".jsonl":
        return [_prompt_of(path, number, line) for number, line in numbered]
    return [line.rstrip("\r") for _, line in numbered]


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{path}, line {number} must be an object such as {{"prompt": "Once upon a time"}}')
    return prompt


def generate_all(
    engine: LocalEngine, prompts: Sequence[str], options: Options, *, in_flight: int
) -> Iterator[FinishedPrompt]:
    """Yields the texts of each prompt; shows a progress bar where stderr is a terminal.

    Args:
        engine: With room for `in_flight` prompts of `options.n` texts.
        prompts: All are checked before the first is generated.
        options: How; without a seed each prompt draws its own.
        in_flight: Prompts in the engine at the same time.

    Raises:
        UsageError: A prompt is too long; nothing was generated.
    """
    seeds = [draw_seed(options) for _ in prompts]
    specs = _all_specs(engine, prompts, options, seeds)
    submitted: deque[RequestStream] = deque()
    with _progress_bar() as progress:
        task = progress.add_task("generating", total=len(prompts) * options.n)
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            submitted.extend(map(engine.submit, specs[index + len(submitted) : index + in_flight]))
            texts = Texts(options.n)
            for event in engine.deltas(submitted.popleft()):
                texts.add(event)
                progress.advance(task, event.delta.finish_reason is not None)
            yield FinishedPrompt(prompt, seed, texts)


def _all_specs(
    engine: LocalEngine, prompts: Sequence[str], options: Options, seeds: Sequence[int]
) -> list[list[SequenceSpec]]:
    specs = []
    for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True), start=1):
        try:
            specs.append(options.specs(engine.served, prompt, seed))
        except UsageError as error:
            raise UsageError(f"prompt {number}: {error}") from None
    return specs


def _progress_bar() -> Progress:
    """On stderr, so that stdout holds nothing but the texts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
