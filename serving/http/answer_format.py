"""What a generating route has to say about the shape of its answers."""

from typing import Any, Protocol

from serving.engine.engine import IndexedDelta, RequestStream
from serving.engine.loading import ServedModel
from serving.http.generation import Generation


class AnswerFormat(Protocol):
    """How a route writes its answers; one object per request."""

    def check(self, served: ServedModel) -> None:
        """Raises the ApiError of a request that this model cannot answer."""

    def whole(self, generation: Generation, stream: RequestStream) -> str:
        """Returns the body, JSON, of an unstreamed answer whose deltas are all there."""

    def event(self, generation: Generation, delta: IndexedDelta) -> dict[str, Any]:
        """Adds a delta to the generation and returns its event of a streamed answer."""

    def closing(self, generation: Generation, stream: RequestStream) -> list[dict[str, Any]]:
        """Returns the events after that of the last delta."""
