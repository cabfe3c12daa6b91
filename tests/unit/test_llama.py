"""The decoder against transformers' LlamaForCausalLM, against float64, and under bf16, compile and casts."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from model.config import ModelConfig
from model.fused import split_parts
from model.kv_cache import KVCache
from model.llama import Llama, RMSNorm, RotaryTables

# The reference's 12 query and 4 key/value heads, narrower.
GROUPED = ModelConfig(vocab_size=320, d_model=96, n_layers=3, n_heads=12, n_kv_heads=4, d_ff=256, max_seq_len=64)
SMALL = ModelConfig(vocab_size=4096, d_model=256, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=704, max_seq_len=256)
CONFIGS = {
    "grouped": GROUPED,
    "small": SMALL,
    "multi_head": ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=4, d_ff=48, max_seq_len=32),
    "multi_query": ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=1, d_ff=48, max_seq_len=32),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[Llama, LlamaForCausalLM]:
    """Our model and transformers', with the same random weights; norms are not all 1."""
    config: ModelConfig = request.param
    ours = build(config)
    theirs = LlamaForCausalLM(LlamaConfig(**config.to_hf()))
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return ours, theirs


def build(config: ModelConfig, seed: int = 0) -> Llama:
    model = Llama(config)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than at the start of training, so that attention is not almost uniform.
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def random_tokens(config: ModelConfig, batch_size: int = 2, n_tokens: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (batch_size, n_tokens or config.max_seq_len), generator=generator)


def shifted_targets(tokens: Tensor) -> Tensor:
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    targets[0, :5] = -100
    return targets


def test_logits_equal_transformers(pair: tuple[Llama, LlamaForCausalLM]) -> None:
    ours, theirs = pair
    tokens = random_tokens(ours.config)
    # 1e-4: fp32 rounding over a few layers of logits of size ~1; in practice the difference is far below.
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_loss_and_every_gradient_equal_transformers(pair: tuple[Llama, LlamaForCausalLM]) -> None:
    ours, theirs = pair
    tokens = random_tokens(ours.config, n_tokens=min(64, ours.config.max_seq_len))
    targets = shifted_targets(tokens)
    sums = ours(tokens, targets)
    loss = sums.nats / sums.tokens
    loss.backward()
    expected = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    mine = split_parts(ours, {name: parameter.grad for name, parameter in ours.named_parameters()})
    assert mine.keys() == gradients.keys()
    for name, gradient in mine.items():
        difference = (gradient - gradients[name]).norm() / gradients[name].norm()
        assert difference < 1e-4, name  # fp32 sums in another order give about 1e-6


def test_parameter_names_are_those_of_hugging_face_without_lm_head() -> None:
    with torch.device("meta"):
        ours = set(Llama(GROUPED).state_dict())
        theirs = set(LlamaForCausalLM(LlamaConfig(**GROUPED.to_hf())).state_dict())
    assert ours == theirs - {"lm_head.weight"}


@pytest.mark.parametrize("config", [*CONFIGS.values(), ModelConfig(vocab_size=50_304)])
def test_n_params_counts_every_tensor_once(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Llama(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.n_params


def test_embedding_and_head_are_one_tensor_after_a_step() -> None:
    model = build(GROUPED)
    tokens = random_tokens(GROUPED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(tokens, shifted_targets(tokens)).nats.backward()
    before = model.model.embed_tokens.weight.detach().clone()
    optimizer.step()
    hidden = model.hidden(tokens)
    after = model.model.embed_tokens.weight
    assert not torch.equal(before, after)
    assert torch.equal(model(tokens), F.linear(hidden, after))


def test_init_depends_on_the_seed_alone_and_leaves_the_global_generator() -> None:
    first, second, other = Llama(GROUPED), Llama(GROUPED), Llama(GROUPED)
    first.init_weights(7)
    state = torch.get_rng_state()
    torch.rand(3)
    torch.set_rng_state(state)
    second.init_weights(7)
    other.init_weights(8)
    assert torch.equal(state, torch.get_rng_state())
    for (name, a), (_, b), (_, c) in zip(first.parts(), second.parts(), other.parts(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("norm" in name)


def test_init_has_the_documented_spread() -> None:
    model = Llama(SMALL)
    model.init_weights(0)
    layer = model.model.layers[0]
    gate = dict(model.parts())["model.layers.0.mlp.gate_proj.weight"]
    # 2 %: the standard error over 65,536 or more draws is 0.3 %.
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert gate.std().item() == pytest.approx(0.02, rel=0.02)
    for residual in (layer.self_attn.o_proj, layer.mlp.down_proj):
        assert residual.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(SMALL.d_model))


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    model = Llama(SMALL)
    model.init_weights(0)
    tokens = random_tokens(SMALL)
    sums = model(tokens, shifted_targets(tokens))
    # 0.1 nats: logits of standard deviation 0.3 at the start add about half their variance.
    assert (sums.nats / sums.tokens).item() == pytest.approx(torch.tensor(4096.0).log().item(), abs=0.1)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = build(GROUPED)
    tokens = random_tokens(GROUPED)
    changed = tokens.clone()
    changed[:, 40:] = 0
    assert torch.equal(model(tokens)[:, :40], model(changed)[:, :40])


def test_rows_of_a_batch_do_not_change_each_other() -> None:
    model = build(GROUPED)
    tokens = random_tokens(GROUPED, batch_size=3)
    # 1e-5: a matrix product of another height may sum in another order.
    torch.testing.assert_close(model(tokens)[1:2], model(tokens[1:2]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("route", ["made", "cast", "cast_and_back", "autocast", "made_on_meta"])
def test_rotary_tables_are_exact_whatever_happens_to_the_model(route: str) -> None:
    config = ModelConfig(vocab_size=8, d_model=64, n_layers=1, n_heads=1, n_kv_heads=1, d_ff=8, max_seq_len=2048)
    with torch.device("meta" if route == "made_on_meta" else "cpu"):
        model = Llama(config)
    if route == "made_on_meta":
        model.to_empty(device="cpu")
    if route in ("cast", "cast_and_back"):
        model.to(torch.bfloat16)
    if route == "cast_and_back":
        model.to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=route == "autocast"):
        cos, sin = model.model.rotary(2048)
    frequencies = 10_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = torch.outer(torch.arange(2048, dtype=torch.float64), frequencies)
    for table, exact in ((cos, angles.cos()), (sin, angles.sin())):
        assert table.dtype == torch.float32
        # 5e-4: an angle of 2047 in fp32 is off by up to 2047 * 2^-23 = 2.4e-4 radian.
        torch.testing.assert_close(table.squeeze(1).double(), exact, atol=5e-4, rtol=0)
    assert len(torch.unique(torch.cat((cos, sin), -1).squeeze(1), dim=0)) == 2048


def test_rotary_tables_are_no_part_of_the_state_dict() -> None:
    assert not RotaryTables(GROUPED).state_dict()


def test_norm_is_computed_in_fp32_on_bf16_input() -> None:
    norm = RMSNorm(SMALL)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, SMALL.d_model, generator=generator) * 30).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + SMALL.norm_eps)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    # Half a unit in the last place of bf16 (2^-8) and no more: only the result was rounded.
    torch.testing.assert_close(y.double(), exact, atol=0, rtol=2**-8)


def test_bf16_training_follows_fp32_training() -> None:
    config = CONFIGS["multi_query"]
    tokens = random_tokens(config)
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Llama(config)
        model.init_weights(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(40):
            with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                sums = model(tokens, shifted_targets(tokens))
            loss = sums.nats / sums.tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[dtype] = loss.item()
    assert losses[torch.float32] < 3.0  # it did learn: log(64) = 4.2
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.02)


def test_bf16_logits_stay_close_to_float64() -> None:
    model = build(GROUPED)
    exact = copy.deepcopy(model).double()
    tokens = random_tokens(GROUPED)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    wanted = exact(tokens)
    # 3 % of the spread of the logits: bf16 keeps 8 bits (0.4 %) through 3 layers of products.
    assert (logits.double() - wanted).std() < 0.03 * wanted.std()


@pytest.mark.parametrize("shape", [(5,), (1, 2, 3)])
def test_tokens_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        build(GROUPED)(torch.zeros(shape, dtype=torch.int64))


def test_more_tokens_than_max_seq_len_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"65.*64"):
        build(GROUPED)(random_tokens(GROUPED, n_tokens=65))


def test_a_contradictory_config_is_refused() -> None:
    with pytest.raises(ValueError, match="n_kv_heads"):
        Llama(ModelConfig(vocab_size=8, d_model=12, n_heads=4, n_kv_heads=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_have_no_graph_break_and_the_same_loss_and_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling refuses graph breaks by itself; aot_eager traces as every backend does, without compiling C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    config = CONFIGS["multi_query"]
    tokens = random_tokens(config)
    results = []
    for is_compiled in (False, True):
        model = build(config)
        if is_compiled:
            model.compile_layers()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            sums = model(tokens, shifted_targets(tokens))
        sums.nats.backward()
        results.append((sums, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (plain, wanted), (compiled, found) = results
    assert (compiled.correct, compiled.tokens) == (plain.correct, plain.tokens)
    torch.testing.assert_close(compiled.nats, plain.nats)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name])


def test_compiled_model_has_the_same_names_and_generates_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model, tokens = build(GROUPED), random_tokens(GROUPED, n_tokens=9)
    names, logits = set(model.state_dict()), model(tokens, cache=KVCache(GROUPED, 2))
    model.compile_layers()
    assert set(model.state_dict()) == names
    assert torch.equal(model(tokens, cache=KVCache(GROUPED, 2)), logits)
