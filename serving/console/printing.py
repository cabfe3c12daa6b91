"""How the generate command shows its texts: as they come, one after another, or as JSON."""

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from serving.console.options import Options
from serving.engine.engine import IndexedDelta
from serving.engine.loading import ServedModel
from serving.engine.sequence import Delta


def draw_seed(options: Options) -> int:
    """Returns the seed asked for, or a new one."""
    return secrets.randbits(63) if options.seed is None else options.seed


@dataclass(slots=True)
class Texts:
    """The texts of one prompt as their deltas come."""

    num_texts: int
    deltas: list[list[Delta]] = field(init=False)

    def __post_init__(self) -> None:
        self.deltas = [[] for _ in range(self.num_texts)]

    def add(self, event: IndexedDelta) -> None:
        """Keeps a delta."""
        self.deltas[event.index].append(event.delta)

    def text(self, index: int) -> str:
        """Returns one text so far."""
        return "".join(delta.text for delta in self.deltas[index])

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts so far."""
        return sum(map(len, self.deltas))

    def plain(self) -> str:
        """Returns a single text as it is, several below each other, each after its number, counted from 1."""
        if self.num_texts == 1:
            return self.text(0)
        return "\n\n".join(f"[{index + 1}] {self.text(index)}" for index in range(self.num_texts))

    def as_json(self, served: ServedModel, prompt: str, seed: int) -> str:
        """Returns one line of JSON with the prompt, where its texts come from, and the finished texts."""
        return json.dumps(
            {
                "prompt": prompt,
                "model": served.name,
                "checkpoint": {"step": served.step, "sha256": served.sha256},
                "seed": seed,
                "outputs": [self._output(index) for index in range(self.num_texts)],
            },
            ensure_ascii=False,
        )

    def _output(self, index: int) -> dict[str, Any]:
        last = self.deltas[index][-1]
        return {
            "index": index,
            "text": self.text(index),
            "tokens": [delta.token for delta in self.deltas[index]],
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }


def print_text(deltas: Iterable[IndexedDelta], texts: Texts) -> None:
    """Collects and prints the texts of a prompt; a single one is printed as it comes."""
    is_single = texts.num_texts == 1
    for event in deltas:
        texts.add(event)
        if is_single:
            print(event.delta.text, end="", flush=True)
    print("" if is_single else texts.plain())
