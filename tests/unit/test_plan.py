"""The plan of the reference run, by hand."""

from pathlib import Path

import pytest

from rayjob.config_file import load_config
from rayjob.hardware import GPUS, find_gpu, mfu_pct
from rayjob.plan import make_plan, render_plan

REFERENCE = Path(__file__).parents[2] / "rayjob" / "configs" / "bookcorpus_4x5090.yaml"


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, object]:
    return make_plan(load_config(REFERENCE, [f"storage={tmp_path}"]))


def test_reference_run_has_the_size_of_the_design(plan: dict[str, object]) -> None:
    assert plan["parameters"] == 128_305_920
    assert plan["tokens_per_step"] == 196_608
    assert plan["grad_accum_steps"] == 3
    assert plan["mflop_per_token"] == 826.3


def test_time_and_cost_follow_from_tokens_flops_and_price(plan: dict[str, object]) -> None:
    on = plan["gpu_types"]["RTX 5090"]  # type: ignore[index]
    time_s = plan["tokens"] * plan["flops_per_token"] / (4 * 209.5e12 * 0.5)  # type: ignore[operator]
    assert on["time_s"] == pytest.approx(time_s, abs=0.1)
    assert on["cost_usd"] == pytest.approx(time_s / 3600 * 4 * 0.64, abs=0.01)
    assert on["fits"]


def test_plan_of_an_unprepared_corpus_says_that_it_estimates(plan: dict[str, object]) -> None:
    assert str(plan["corpus_tokens_basis"]).startswith("estimated")
    assert "estimated" in render_plan(plan)


def test_batch_that_does_not_fit_is_named(tmp_path: Path) -> None:
    overrides = [f"storage={tmp_path}", "train.micro_batch_size=384", "train.global_batch_size=1536"]
    plan = make_plan(load_config(REFERENCE, overrides))
    assert not plan["gpu_types"]["RTX 5090"]["fits"]
    assert "does not fit in 32 GiB" in render_plan(plan)


def test_full_peak_is_100_percent_mfu() -> None:
    gpu = GPUS[0]
    assert mfu_pct(1e9, 2 * gpu.peak_tflops * 1e12 / 1e9, 2, gpu) == pytest.approx(100)


def test_gpu_is_found_by_its_device_name_and_an_unknown_one_is_none() -> None:
    found = find_gpu("NVIDIA GeForce RTX 5090")
    assert found is not None
    assert found.peak_tflops == 209.5
    assert find_gpu("Some Other Accelerator") is None
