"""A sequence on its way through the engine: what was asked, what it has said, and who waits for it."""

import time
from dataclasses import dataclass

from model.sampling import uniform
from serving.engine.sampler import Draw
from serving.engine.scoring import PromptScorer
from serving.engine.sequence import SequenceSpec, Transcript
from serving.engine.stream import RequestStream


@dataclass(slots=True, eq=False)
class EngineSequence:
    """A sequence of a request on its way through the engine."""

    index: int
    spec: SequenceSpec
    request: RequestStream
    transcript: Transcript
    scorer: PromptScorer | None = None
    started_at_s: float | None = None
    is_done: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt)

    @property
    def wants_scores(self) -> bool:
        return self.spec.prompt_logprobs is not None

    @property
    def is_gone(self) -> bool:
        """Whether it needs its slot no longer."""
        return self.is_done or self.request.is_cancelled

    @property
    def last_position(self) -> int:
        """Position of the newest token."""
        return len(self.spec.prompt) + len(self.transcript.output) - 1

    def start(self) -> None:
        """Notes the time at which the first work for it is done."""
        self.started_at_s = self.started_at_s or time.monotonic()
        self.request.started_at_s = self.request.started_at_s or self.started_at_s

    def draw(self) -> Draw:
        """Returns what decides its next token."""
        spec, output = self.spec, self.transcript.output
        number = uniform(spec.seed, spec.choice, len(output))
        return Draw(spec.params, spec.prompt, output, number, spec.n_top_logprobs)
