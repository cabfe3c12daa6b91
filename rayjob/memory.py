"""The memory that training takes on one device, estimated from above."""

from model.config import ModelConfig
from model.loss import MAX_LOGITS
from rayjob.config import JobConfig


def state_bytes(config: JobConfig) -> int:
    """Returns the bytes of weights, gradients and two moments in fp32, and of the weights' copies in bf16."""
    return config.model.n_params * (16 + _width_bytes(config))


def activation_bytes(config: JobConfig, micro_batch_size: int) -> int:
    """Returns the bytes that a forward and backward take beside the state.

    Kept of a layer for backward, per token and in bf16: 9 vectors of d_model, two of them in fp32, and 3 of d_ff. The
    loss holds one piece of logits in both precisions, and the weight's gradient in fp32 once more.
    """
    model: ModelConfig = config.model
    tokens, width = micro_batch_size * model.max_seq_len, _width_bytes(config)
    layers = tokens * model.n_layers * (9 * model.d_model + 3 * model.d_ff) * width
    return layers + min(MAX_LOGITS, tokens * model.vocab_size) * (width + 4) + 4 * model.vocab_size * model.d_model


def _width_bytes(config: JobConfig) -> int:
    return 2 if config.train.precision == "bf16" else 4
