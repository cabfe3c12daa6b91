"""What the generate command can be told, on the command line or by /set: one check for both."""

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import Any

from model.sampling import SamplingParams
from serving.engine.context import fit_prompt
from serving.engine.loading import ServedModel
from serving.engine.sequence import SequenceSpec

MAX_SEED = 2**63 - 1
MAX_OUTPUTS = 64
SAMPLING = tuple(field.name for field in fields(SamplingParams))
SETTABLE = ("max_new_tokens", *SAMPLING, "stop")


class UsageError(ValueError):
    """Something was asked for that cannot be done; nothing was generated."""


@dataclass(frozen=True, slots=True)
class Options:
    """How texts are generated.

    Attributes:
        max_new_tokens: None for the room left, at most 128.
        seed: None for a new one each time.
        n: Texts for each prompt.
        stop: Strings before which a text ends.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises the UsageError that names every problem."""
        problems = self.params.problems()
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            problems.append(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            problems.append(f"seed must be in 0..{MAX_SEED}, got {self.seed}")
        if not 1 <= self.n <= MAX_OUTPUTS:
            problems.append(f"n must be in 1..{MAX_OUTPUTS}, got {self.n}")
        if "" in self.stop:
            problems.append("stop must have at least one character")
        if problems:
            raise UsageError("; ".join(problems))

    def get(self, name: str) -> object:
        """Returns the value of a name of SETTABLE."""
        return getattr(self.params if name in SAMPLING else self, name)

    def set(self, name: str, text: str) -> "Options":
        """Returns the options after `/set name text`.

        Raises:
            UsageError: There is no such name, or it cannot have this value.
        """
        if name not in SETTABLE:
            nearest = difflib.get_close_matches(name, SETTABLE, n=1, cutoff=0.0)[0]
            raise UsageError(f"there is no setting {name}: the nearest one is {nearest}")
        if name == "stop":
            changed = replace(self, stop=(text,) if text else ())
        elif name == "max_new_tokens":
            changed = replace(self, max_new_tokens=_number(name, text, int))
        else:
            kind = type(getattr(SamplingParams(), name))
            changed = replace(self, params=replace(self.params, **{name: _number(name, text, kind)}))
        changed.check()
        return changed

    def specs(self, served: ServedModel, prompt: str, seed: int) -> list[SequenceSpec]:
        """Returns the sequences of one prompt, one per text.

        Raises:
            UsageError: The prompt is empty or too long.
        """
        tokens = served.tokenizer.encode_prompt(prompt)
        if not tokens:
            raise UsageError("the prompt is empty: give at least one character")
        try:
            fitted = fit_prompt(tokens, self.max_new_tokens, served.max_seq_len)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return [
            SequenceSpec(fitted.tokens, fitted.max_new_tokens, seed, choice, self.params, self.stop)
            for choice in range(self.n)
        ]


def _number(name: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise UsageError(f"{name} must be {wanted}, got {text!r}") from None
