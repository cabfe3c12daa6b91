"""The plan of the reference run, by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rayjob.config import JobConfig
from rayjob.config_file import load_config
from rayjob.hardware import GPUS, Gpu, find_gpu, mfu_pct
from rayjob.plan import make_plan, plan_line, render_plan
from rayjob.step_time import fit_efficiency, step_time
from rayjob.training.metrics import METRICS_FILE, MetricsRow, MetricsWriter

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


def test_plan_of_auto_reckons_with_the_usual_size_until_the_run_has_found_its_own(tmp_path: Path) -> None:
    config = load_config(REFERENCE, [f"storage={tmp_path}", "train.micro_batch_size=auto"])
    plan = make_plan(config)
    assert (plan["micro_batch_size"], plan["grad_accum_steps"]) == (32, 3)
    assert "assumed" in render_plan(plan)
    assert all(on["fits"] for on in plan["gpu_types"].values())
    write_rows(config, n_rows=3, tokens_per_s=400_000.0, mfu_pct=39.4, micro_batch_size=48)
    plan = make_plan(config)
    assert (plan["micro_batch_size"], plan["grad_accum_steps"]) == (48, 2)
    assert "48 windows, found by bookcorpus-128m" in render_plan(plan)


def test_step_of_many_gpus_is_compute_all_reduce_and_update_by_hand(tmp_path: Path) -> None:
    config, gpu = load_config(REFERENCE, [f"storage={tmp_path}"]), GPUS[0]
    step = step_time(config, gpu, 4, efficiency=0.5)
    assert step.compute_s == pytest.approx(196_608 * 826.3e6 / (4 * 209.5e12 * 0.5), rel=1e-4)
    assert step.all_reduce_s == pytest.approx(1.5 * 4 * 128_305_920 / 15e9)
    # The backward of one micro-step of three hides the layers' gradients, but never the embedding's.
    embedding_s = 1.5 * 4 * 50_304 * 768 / 15e9
    hidden_s = step.compute_s / 3 * 2 / 3
    assert step.exposed_s == pytest.approx(embedding_s + max(0.0, step.all_reduce_s - embedding_s - hidden_s))
    assert step.update_s == pytest.approx(28 * 128_305_920 / 1792e9)
    alone = step_time(config, gpu, 1, efficiency=0.5)
    assert alone.exposed_s == 0
    compressed = load_config(REFERENCE, [f"storage={tmp_path}", "train.allreduce_dtype=bf16"])
    assert step_time(compressed, gpu, 4, efficiency=0.5).all_reduce_s == step.all_reduce_s / 2


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_efficiency_is_found_again_from_the_step_it_gives(gpu: Gpu, tmp_path: Path) -> None:
    config = load_config(REFERENCE, [f"storage={tmp_path}"])
    seconds = step_time(config, gpu, 8, efficiency=0.43).step_s
    assert fit_efficiency(config, gpu, 8, seconds) == pytest.approx(0.43, rel=1e-6)


def test_more_gpus_take_less_time_and_lose_efficiency(plan: dict[str, Any]) -> None:
    for on in plan["gpu_types"].values():
        counts = on["counts"]
        assert list(counts) == ["1", "2", "4", "8", "16", "32", "64"]
        times = [at["time_s"] for at in counts.values()]
        assert times == sorted(times, reverse=True)
        scaling = [at["scaling_pct"] for at in counts.values()]
        assert scaling[0] == 100
        assert scaling == sorted(scaling, reverse=True)
    assert plan["gpu_types"]["H100"]["counts"]["64"]["micro_batch_size"] == 6, "384 windows over 64"
    # The stated MFU is that of the configured number of GPUs.
    on = plan["gpu_types"]["RTX 5090"]
    assert on["counts"]["4"]["time_s"] == pytest.approx(on["time_s"], rel=1e-3)


def test_disk_and_traffic_follow_from_the_size_of_a_checkpoint(plan: dict[str, Any]) -> None:
    assert plan["checkpoint_gib"] == pytest.approx(12 * 128_305_920 / 2**30, abs=0.01)
    on = plan["gpu_types"]["RTX 5090"]
    by_time, by_validation = on["time_s"] / 180, plan["steps"] / 500
    assert on["saves"] == pytest.approx(by_time + by_validation, abs=1)
    assert on["checkpoint_traffic_gib"] == pytest.approx(on["saves"] * 12 * 128_305_920 / 2**30, abs=0.1)
    assert plan["disk_gib"] > 4 * plan["checkpoint_gib"]


def test_measured_steps_replace_the_assumption(tmp_path: Path) -> None:
    config = load_config(REFERENCE, [f"storage={tmp_path}"])
    write_rows(config, n_rows=20, tokens_per_s=400_000.0, mfu_pct=39.4)
    plan = make_plan(config)
    assert (plan["mfu_pct"], plan["mfu_basis"]) == (39.4, "measured over 20 steps of bookcorpus-128m")
    measured = plan["measured"]
    assert measured["time_left_s"] == pytest.approx((plan["steps"] - 20) * 196_608 / 400_000, rel=1e-3)
    assert measured["cost_left_usd"] == pytest.approx(measured["time_left_s"] / 3600 * 4 * 0.64, abs=0.01)
    assert "400,000 tokens/s over 20 steps" in plan_line(config)
    assert "400,000 tokens/s over 20 steps" in render_plan(plan)


def test_mfu_of_a_cpu_says_nothing_about_gpus(tmp_path: Path) -> None:
    config = load_config(REFERENCE, [f"storage={tmp_path}", "train.use_gpu=false"])
    write_rows(config, n_rows=3, tokens_per_s=500.0, mfu_pct=70.0)
    plan = make_plan(config)
    assert (plan["mfu_pct"], plan["mfu_basis"]) == (50.0, "assumed")
    assert plan["measured"]["mfu_pct"] == 70.0


def test_line_at_the_start_tells_steps_and_what_is_known_of_the_time(tmp_path: Path) -> None:
    on_gpus = load_config(REFERENCE, [f"storage={tmp_path}"])
    assert "RTX 5090" in plan_line(on_gpus)
    on_cpus = load_config(REFERENCE, [f"storage={tmp_path}", "train.use_gpu=false"])
    assert "known after the first steps" in plan_line(on_cpus)


def write_rows(config: JobConfig, n_rows: int, tokens_per_s: float, mfu_pct: float, micro_batch_size: int = 0) -> None:
    config.run_folder.mkdir(parents=True)
    writer = MetricsWriter(config.run_folder, 0)
    names = {field.name: 0 if field.type in (int, "int") else 0.0 for field in dataclasses.fields(MetricsRow)}
    for step in range(1, n_rows + 1):
        values = names | {"step": step, "epoch": 0, "tokens": step * config.tokens_per_step}
        values |= {"micro_batch_size": micro_batch_size}
        writer.write(MetricsRow(**values | {"tokens_per_s": tokens_per_s, "mfu_pct": mfu_pct}))  # type: ignore[arg-type]
    writer.close()
    assert (config.run_folder / METRICS_FILE).exists()


def test_full_peak_is_100_percent_mfu() -> None:
    peak_tflops = GPUS[0].peak_tflops
    assert mfu_pct(1e9, 2 * peak_tflops * 1e12 / 1e9, 2, peak_tflops) == pytest.approx(100)


@pytest.mark.parametrize(
    ("device_name", "peak_tflops"),
    [("NVIDIA GeForce RTX 5090", 209.5), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5)],
)
def test_gpu_is_found_by_its_device_name(device_name: str, peak_tflops: float) -> None:
    found = find_gpu(device_name)
    assert found is not None
    assert found.peak_tflops == peak_tflops


@pytest.mark.parametrize(
    "device_name", ["Some Other Accelerator", "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA GB200"]
)
def test_unknown_gpu_has_no_peak_even_if_its_name_is_like_a_known_one(device_name: str) -> None:
    assert find_gpu(device_name) is None


def test_every_peak_names_its_source_and_every_device_name_is_of_one_gpu() -> None:
    assert all(gpu.source for gpu in GPUS)
    names = [name for gpu in GPUS for name in gpu.device_names]
    assert len(names) == len(set(names))
