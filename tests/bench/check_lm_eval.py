"""lm-eval's local-completions against the service: its loglikelihoods beside those of a direct forward.

    python -m venv lm && lm/bin/pip install "lm-eval[api]"
    python -m tests.bench.check_lm_eval --checkpoint storage/runs/small --books FOLDER --lm_eval_python lm/bin/python

Items are pairs of neighbouring pieces of the books' texts; the service is the app behind uvicorn on loopback. The last
stdout line is JSON; the exit code is 1 when a score is off by more than 1e-3 or a greedy text differs.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from model.generate import generate
from model.sampling import SamplingParams
from serving.engine.loading import ServedModel
from tests.serving_server import http_server

TOLERANCE = 1e-3
NEW_TOKENS = 24

CHILD = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

given = json.load(sys.stdin)
lm = LocalCompletionsAPI(
    base_url=given["url"] + "/v1/completions", model=given["model"], tokenizer_backend="remote", batch_size=8,
    num_concurrent=1, max_length=given["max_length"],
)
def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]
pairs = [tuple(pair) for pair in given["pairs"]]
scores = lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
options = {"until": ["\\n\\n"], "max_gen_toks": given["new_tokens"], "temperature": 0}
wanted = instances("generate_until", [(context, options) for context, _ in pairs[:40]])
texts = lm.generate_until(wanted, disable_tqdm=True)
print(json.dumps({"scores": scores, "texts": texts}))
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--lm_eval_python", type=Path, required=True)
    parser.add_argument("--items", type=int, default=300)
    arguments = parser.parse_args()
    pairs = make_pairs(arguments.books, arguments.items)
    with http_server(arguments.checkpoint.resolve()) as server:
        served = server.service.engine().served
        given = {"url": server.url, "model": served.name, "max_length": served.max_seq_len, "pairs": pairs}
        found = ask_lm_eval(arguments.lm_eval_python, {**given, "new_tokens": NEW_TOKENS})
    expected = [direct_score(served, *pair) for pair in pairs]
    errors = [abs(score - direct) for (score, _), (direct, _) in zip(found["scores"], expected, strict=True)]
    greedy = sum(flag == direct for (_, flag), (_, direct) in zip(found["scores"], expected, strict=True))
    texts = [greedy_text(served, context) for context, _ in pairs[: len(found["texts"])]]
    same = sum(text == own for text, own in zip(found["texts"], texts, strict=True))
    report = {
        "items": len(pairs),
        "largest_error": max(errors),
        "same_greedy_flag": greedy,
        "generated": len(texts),
        "same_text": same,
    }
    print(json.dumps(report))
    return 0 if max(errors) <= TOLERANCE and greedy == len(pairs) and same == len(texts) else 1


def make_pairs(books: Path, count: int) -> list[tuple[str, str]]:
    """Returns (context, continuation) of 20 to 600 and 5 to 80 characters from random places."""
    rng = random.Random(0)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(books.glob("*.txt"))]
    pairs = []
    while len(pairs) < count:
        text = rng.choice(texts)
        start, middle = rng.randrange(len(text) - 1000), rng.randint(20, 600)
        end = middle + rng.randint(5, 80)
        words = " ".join(text[start : start + end].split())
        cut = words.rfind(" ", 0, min(middle, len(words) - 2))
        if cut > 10:
            pairs.append((words[:cut], words[cut:]))
    return pairs


def ask_lm_eval(python: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Runs lm-eval in its own environment."""
    child = subprocess.run([python, "-c", CHILD], input=json.dumps(given), capture_output=True, text=True)
    if child.returncode:
        sys.exit(child.stderr)
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


@torch.inference_mode()
def direct_score(served: ServedModel, context: str, continuation: str) -> tuple[float, bool]:
    """Returns the continuation's log-probability, and whether it is the greedy one, from one forward."""
    whole = served.tokenizer.encode_prompt(context + continuation)
    start = len(served.tokenizer.encode_prompt(context))
    logprobs = served.model(torch.tensor([whole]))[0, start - 1 : -1].float().log_softmax(-1)
    tokens = torch.tensor(whole[start:])
    scores = logprobs.gather(1, tokens[:, None])[:, 0]
    return float(scores.sum()), bool((logprobs.argmax(1) == tokens).all())


def greedy_text(served: ServedModel, context: str) -> str:
    """Returns what the naive generator says, up to an empty line."""
    prompt, eos_id = served.tokenizer.encode_prompt(context), served.tokenizer.eos_id
    params = SamplingParams(temperature=0)
    tokens = generate(served.model, prompt, params, max_new_tokens=NEW_TOKENS, seed=0, eos_id=eos_id)
    return served.tokenizer.decode(one.token for one in tokens).split("\n\n")[0]


if __name__ == "__main__":
    sys.exit(main())
