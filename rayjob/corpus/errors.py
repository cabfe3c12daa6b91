"""What can stop a corpus from being prepared."""


class CorpusError(ValueError):
    """Everything that is wrong with a corpus, one sentence a line."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[type["CorpusError"], tuple[list[str]]]:
        # The default would rebuild the error from its message, and it must survive Ray's process boundaries.
        return CorpusError, (self.problems,)


class PrepareCancelled(RuntimeError):
    """The caller asked to stop; what was finished stays on storage and the next call goes on from there."""
