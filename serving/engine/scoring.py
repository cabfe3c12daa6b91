"""How probable a model finds the tokens of a given prompt, a chunk at a time so that nobody waits long for it.

T tokens of a chunk, V vocab_size
"""

from collections.abc import Sequence

import torch

from model.kv_cache import KVCache
from model.llama import Llama
from serving.engine.sampler import top_logprobs
from serving.engine.sequence import PromptScores

CHUNK_TOKENS = 64
"""Tokens scored at once: about as long as a decode step of many rows, so that a running stream does not halt."""


class PromptScorer:
    """Scores one prompt by calling `advance` until `is_done`.

    It runs the checkpoint's own fp32 weights, whatever the engine decodes with, so that the scores are those
    of a direct forward.

    Attributes:
        scores: Of the tokens scored so far.
    """

    def __init__(self, model: Llama, prompt: Sequence[int], n_top: int) -> None:
        self.scores = PromptScores()
        self._model = model
        self._prompt = prompt
        self._n_top = n_top
        weight = model.model.embed_tokens.weight
        self._cache = KVCache(model.config, 1, weight.dtype, weight.device)

    @property
    def is_done(self) -> bool:
        return len(self.scores.logprobs) == len(self._prompt) - 1

    @torch.inference_mode()
    def advance(self) -> None:
        """Scores the next chunk."""
        start = len(self.scores.logprobs)
        end = min(start + CHUNK_TOKENS, len(self._prompt) - 1)
        tokens = torch.tensor([self._prompt[start : end + 1]], device=self._cache.keys[0].device)
        logits = self._model(tokens[:, :-1], cache=self._cache)[0]  # (T, V)
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        self.scores.logprobs.extend(own.tolist())
        self.scores.top_logprobs.extend(top_logprobs(logprobs, self._n_top))
