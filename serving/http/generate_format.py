"""The answers of POST /generate."""

import uuid
from typing import Any

from serving.engine.engine import IndexedDelta, RequestStream
from serving.engine.loading import ServedModel
from serving.http.answers import GenerateAnswer, Output, StreamEnd
from serving.http.generation import Generation
from serving.http.service import checkpoint_id


class GenerateFormat:
    """The flat form of our own; see `GenerateAnswer` and `StreamEvent`."""

    def check(self, served: ServedModel) -> None:
        """Takes every model: /generate names none."""

    def whole(self, generation: Generation, stream: RequestStream) -> str:
        """Returns the body of an unstreamed answer."""
        outputs = [_output(generation, index) for index in range(len(generation.deltas))]
        answer = GenerateAnswer(
            id=f"gen-{uuid.uuid4().hex}",
            model=generation.served.name,
            checkpoint=checkpoint_id(generation.served),
            text=outputs[0].text,
            outputs=outputs,
            usage=generation.usage(),
            timings=generation.timings(stream),
        )
        return answer.model_dump_json()

    def event(self, generation: Generation, delta: IndexedDelta) -> dict[str, Any]:
        """Returns one token's event, a `StreamEvent`: a plain dict, as there may be thousands a second."""
        event = {
            "index": delta.index,
            "text": generation.add(delta),
            "token": delta.delta.token,
            "finish_reason": delta.delta.finish_reason,
        }
        logprobs = generation.logprobs(delta.delta)
        return event if logprobs is None else {**event, "logprobs": logprobs.model_dump()}

    def closing(self, generation: Generation, stream: RequestStream) -> list[dict[str, Any]]:
        """Returns the event with usage, timings and seed."""
        end = StreamEnd(usage=generation.usage(), timings=generation.timings(stream), seed=generation.seed)
        return [end.model_dump()]


def _output(generation: Generation, index: int) -> Output:
    deltas = generation.deltas[index]
    finish_reason = deltas[-1].finish_reason
    assert finish_reason is not None, "an unfinished sequence has no output"
    logprobs = [entry for delta in deltas if (entry := generation.logprobs(delta)) is not None]
    return Output(
        index=index,
        text=generation.text(index),
        tokens=[delta.token for delta in deltas],
        finish_reason=finish_reason,
        stop_reason=deltas[-1].stop_reason,
        seed=generation.seed,
        logprobs=None if generation.request.logprobs is None else logprobs,
    )
