"""A text sample at each validation: what the model writes now, from the same openings every time."""

from pathlib import Path

from model.generate import generate, room_left
from model.llama import Llama
from model.sampling import SamplingParams
from model.tokenizer import Tokenizer

SAMPLES_FOLDER = "samples"
_OPENINGS = ("The", "She said that", "It was a dark night, and")
_MAX_NEW_TOKENS = 48


def draw_sample(model: Llama, tokenizer: Tokenizer, seed: int) -> str:
    """Returns one paragraph for each opening, the same draw at every step."""
    is_training = model.training
    model.eval()
    texts = [_continue(model, tokenizer, opening, seed) for opening in _OPENINGS]
    model.train(is_training)
    return "\n\n".join(texts) + "\n"


def write_sample(run_folder: Path, step: int, sample: str) -> None:
    """Writes samples/step_XXXXXXXX.txt."""
    path = run_folder / SAMPLES_FOLDER / f"step_{step:08d}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(sample, encoding="utf-8")


def _continue(model: Llama, tokenizer: Tokenizer, opening: str, seed: int) -> str:
    max_seq_len = model.config.max_seq_len
    prompt = tokenizer.encode_prompt(opening)[:max_seq_len]
    tokens = generate(
        model,
        prompt,
        SamplingParams(),
        max_new_tokens=min(_MAX_NEW_TOKENS, room_left(len(prompt), max_seq_len)),
        seed=seed,
        eos_id=tokenizer.eos_id,
    )
    return tokenizer.decode([*prompt, *(generated.token for generated in tokens)])
