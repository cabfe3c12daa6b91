"""`--interactive`: a prompt a line, settings that change by command, and Ctrl-C that stops only the text."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from serving.console.local_engine import LocalEngine
from serving.console.options import SETTABLE, Options, UsageError
from serving.console.printing import Texts, draw_seed, print_text

HELP = """\
A line is a prompt. Commands:
  /set NAME VALUE   changes a setting, for example /set temperature 0.5
  /set              shows all settings
  /seed             shows the seed of the last text
  /seed N           takes this seed from now on; /seed new draws one for each text
  /again            repeats the last prompt
  /help             shows this
  /quit             ends, as Ctrl-D does
Ctrl-C stops a text. A prompt that begins with / is written with two."""


class Conversation:
    """Reads lines until the end of the input and answers each."""

    def __init__(self, engine: LocalEngine, options: Options) -> None:
        self._engine = engine
        self._options = options
        self._last_prompt = ""
        self._last_seed: int | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "set": self._set,
            "seed": self._seed,
            "again": lambda _: self._generate(self._last_prompt),
            "help": lambda _: _say(HELP),
        }

    def run(self) -> None:
        """Converses until Ctrl-D or /quit."""
        _say("One prompt a line; /help shows the commands, Ctrl-D ends.")
        with _history():
            while (line := _read_line()) is not None and line.strip() != "/quit":
                try:
                    self._answer(line)
                except UsageError as error:
                    _say(f"error: {error}")

    def _answer(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].strip().partition(" ")
            if name not in self._commands:
                raise UsageError(f"there is no command /{name}: /help shows them")
            self._commands[name](argument.strip())
        else:
            self._generate(line.removeprefix("/"))

    def _generate(self, prompt: str) -> None:
        seed = draw_seed(self._options)
        specs = self._options.specs(self._engine.served, prompt, seed)
        self._last_prompt, self._last_seed = prompt, seed
        started_at_s, texts = time.monotonic(), Texts(len(specs))
        with contextlib.closing(self._engine.deltas(self._engine.submit(specs))) as deltas:
            try:
                print_text(deltas, texts)
            except KeyboardInterrupt:
                print()
        rate = texts.num_tokens / max(time.monotonic() - started_at_s, 1e-6)
        _say(f"[{texts.num_tokens} tokens, {rate:.0f} tokens/s, seed {seed}]")

    def _set(self, argument: str) -> None:
        if argument:
            name, _, value = argument.partition(" ")
            self._options = self._options.set(name, value.strip())
        for name in [argument.split()[0]] if argument else SETTABLE:
            _say(f"{name} = {self._options.get(name)}")

    def _seed(self, argument: str) -> None:
        if argument == "new":
            self._options = replace(self._options, seed=None)
        elif argument:
            if not argument.isdecimal():
                raise UsageError(f"seed must be a number or the word new, got {argument!r}")
            fixed = replace(self._options, seed=int(argument))
            fixed.check()
            self._options = fixed
        drawn = "a new one for each text" if self._options.seed is None else str(self._options.seed)
        last = "" if self._last_seed is None else f"; the last text had {self._last_seed}"
        _say(f"seed = {drawn}{last}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _read_line() -> str | None:
    """The next line; None at the end of the input. Ctrl-C drops what was typed so far."""
    while True:
        try:
            return input("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            _say("\n(Ctrl-D ends)")


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing and a history that outlives the program, where this Python and the home folder allow it."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = state / "rayjob" / "generate_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
