"""Naive generation against transformers' generate and against itself without a cache."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model.config import ModelConfig
from model.generate import generate
from model.llama import Llama
from model.sampling import SamplingParams

CONFIG = ModelConfig(vocab_size=320, d_model=96, n_layers=3, n_heads=12, n_kv_heads=4, d_ff=128, max_seq_len=128)
PROMPT = [5, 200, 31, 7]
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def model() -> Llama:
    model = Llama(CONFIG)
    model.init_weights(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # sharp enough that greedy text does not just repeat the last token
    return model.eval()


def tokens_of(model: Llama, params: SamplingParams = SAMPLED, **changes: object) -> list[int]:
    settings = {"max_new_tokens": 40, "seed": 1, "eos_id": None, **changes}
    return [step.token for step in generate(model, PROMPT, params, **settings)]  # type: ignore[arg-type]


def test_100_greedy_tokens_equal_transformers(model: Llama) -> None:
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG.to_hf())).eval()
    theirs.load_state_dict(model.state_dict(), strict=False)
    inputs = torch.tensor([PROMPT])
    wanted = theirs.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=100,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens = tokens_of(model, GREEDY, max_new_tokens=100)
    assert tokens == wanted[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) > 10


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5)])
def test_cache_does_not_change_the_text(model: Llama, params: SamplingParams) -> None:
    assert tokens_of(model, params) == tokens_of(model, params, use_cache=False)


def test_seed_and_choice_decide_the_text(model: Llama) -> None:
    assert tokens_of(model) == tokens_of(model)
    texts = {tuple(tokens_of(model, seed=seed, choice=choice)) for seed in (1, 2) for choice in (0, 1)}
    assert len(texts) == 4


def test_text_ends_with_eos_which_is_yielded(model: Llama) -> None:
    tokens = tokens_of(model)
    eos_id = tokens[10]
    first = tokens.index(eos_id)
    assert tokens_of(model, eos_id=eos_id) == tokens[: first + 1]


def test_logprobs_are_the_log_softmax_of_the_raw_logits(model: Llama) -> None:
    params = SamplingParams(temperature=0.5, top_k=2, repetition_penalty=2.0)
    steps = list(generate(model, PROMPT, params, max_new_tokens=5, seed=1, eos_id=None, n_top_logprobs=3))
    sequence = torch.tensor([PROMPT + [step.token for step in steps]])
    logprobs = model(sequence)[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for step, row in zip(steps, logprobs, strict=True):
        assert step.logprob == pytest.approx(row[step.token].item(), abs=1e-4)  # cached and whole pass differ so
        values, tokens = row.topk(3)
        assert [token for token, _ in step.top_logprobs] == tokens.tolist()
        assert [value for _, value in step.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)


def test_no_top_logprobs_unless_asked_for(model: Llama) -> None:
    assert next(generate(model, PROMPT, SAMPLED, max_new_tokens=1, seed=0, eos_id=None)).top_logprobs == []


def test_prompt_and_new_tokens_may_fill_max_seq_len_exactly(model: Llama) -> None:
    assert len(tokens_of(model, max_new_tokens=124)) == 124


def test_prompt_that_fills_the_context_has_one_token_more(model: Llama) -> None:
    prompt = list(range(128))
    (generated,) = generate(model, prompt, GREEDY, max_new_tokens=1, seed=0, eos_id=None)
    assert generated.token == int(model(torch.tensor([prompt]))[0, -1].argmax())


@pytest.mark.parametrize(
    ("prompt", "params", "max_new_tokens", "named"),
    [
        ([], GREEDY, 1, "prompt is empty"),
        (PROMPT, GREEDY, 125, "at most 124.*128"),
        (PROMPT, GREEDY, 0, "max_new_tokens=0"),
        (list(range(128)), GREEDY, 2, "at most 1"),
        (list(range(129)), GREEDY, 1, "at most 0"),
        (PROMPT, SamplingParams(top_p=0.0), 1, "top_p"),
    ],
)
def test_bad_arguments_are_refused_by_the_call_itself(
    model: Llama, prompt: list[int], params: SamplingParams, max_new_tokens: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        generate(model, prompt, params, max_new_tokens=max_new_tokens, seed=0, eos_id=None)
