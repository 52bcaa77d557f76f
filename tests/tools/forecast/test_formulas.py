"""Memory and time formulas against published numbers and identities."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama import cli
from megatron_llama.config.settings import DEVICES, ModelConfig
from megatron_llama.devices import INDUCTOR, NAMES, device_named
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.forecast_job import Job, job_of_plan
from megatron_llama.plan.memory import States, footprint, layer_activations, microbatches_in_flight
from megatron_llama.tools.forecast.hardware import devices, find_device
from megatron_llama.tools.forecast.step_time import StepTime, kernel_count, load_constants, step_time
from megatron_llama.tools.forecast.this_machine import (
    COLLECTIVES,
    Calibration,
    NotCalibrated,
    calibration_path,
    filled,
    fit_gemms,
    fit_line,
    load_calibration,
    local_step_time,
)
from megatron_llama.tools.plan import measure_machine
from megatron_llama.tools.plan.cli import main
from tests.config.helpers import make
from tests.golden import GoldenFiles

LLAMA = ModelConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008, vocab_size=32_000
)
NOTHING = States(0, 0, 0)
PLAIN = Job(LLAMA, seq=4096, micro_batch=1, num_microbatches=16)


def test_bubble_is_p_minus_1_over_v_m() -> None:
    """The number of micro batches in flight, and the bubble."""
    job = replace(PLAIN, pp=8)
    assert [microbatches_in_flight(job, stage) for stage in (0, 3, 7)] == [8, 5, 1]
    assert microbatches_in_flight(replace(job, num_microbatches=2), 0) == 2
    interleaved = replace(job, vpp=4, num_microbatches=64)
    assert microbatches_in_flight(interleaved, 0) == pytest.approx(8 * (1 + 7 / 32))
    job = replace(PLAIN, pp=4, dp=2)
    one, interleaved = seconds(job), seconds(replace(job, vpp=4))
    stages = one.matmul + one.attention + one.memory_bound + one.launch - load_constants()["launch.step"]
    assert one.bubble == pytest.approx(stages * 3 / 16, rel=0.05)  # only the last stage has the head
    assert interleaved.bubble == pytest.approx(one.bubble / 4)
    assert seconds(replace(PLAIN, pp=1)).bubble == 0


def seconds(job: Job, device: str = "h100") -> StepTime:
    spec = find_device(device)
    assert spec is not None
    return step_time(job, spec.per_rank(), load_constants())


def test_offloading_takes_time() -> None:
    base, count = seconds(PLAIN), PLAIN.stage_parameters(0)
    assert base.offload == 0
    offloaded = seconds(replace(PLAIN, offloads_optimizer=True))
    state = PLAIN.state
    weight = state.master or state.weight
    copies, step = 3 * weight / 20e9, (3 * weight + 2 * state.moments) / 25e9
    assert offloaded.optimizer == 0 and offloaded.offload == pytest.approx(count * (copies + step), rel=1e-6)
    # Copies of activations overlap with computing.
    assert seconds(replace(PLAIN, offloads_activations=True, recompute="full")).offload == 0
    copied = 2 * sum(layer_activations(PLAIN).values()) * sum(PLAIN.layers_by_stage) * PLAIN.num_microbatches / 20e9
    working = base.matmul + base.head + base.attention + base.memory_bound + base.launch
    working -= load_constants()["launch.step"]
    assert copied > working
    assert seconds(replace(PLAIN, offloads_activations=True)).offload == pytest.approx(copied - working, rel=1e-6)


def test_async_tp_overlaps_communication_and_needs_two_buffers() -> None:
    compiled = replace(PLAIN, tp=8, sp=True, kernels="compiled", upcasts_logits=False)
    overlapped = replace(compiled, overlaps_tp=True)
    assert 0 < seconds(overlapped).tensor < seconds(compiled).tensor
    # Two buffers of an eighth of 4096 tokens of 4096 bf16 values.
    assert (
        footprint(overlapped, 0, NOTHING).buffers - footprint(compiled, 0, NOTHING).buffers == 2 * 4096 * 4096 * 2 // 8
    )
    words = {"trainer.tp": 2, "trainer.compile": True, "trainer.global_batch_size": 8}
    plans = [resolve(make(**words, **{"trainer.async_tp": on}), 2) for on in (False, True)]
    jobs = [job_of_plan(plan) for plan in plans]
    assert [(job.kernels, job.overlaps_tp, job.upcasts_logits) for job in jobs] == [
        ("compiled", on, False) for on in (False, True)
    ]


def test_float8_multiplies_blocks_faster_and_casts_their_inputs() -> None:
    shape = {"model.hidden_size": 4096, "model.intermediate_size": 11008, "model.num_attention_heads": 32}
    words = {**shape, "device.name": "cuda", "data.seq_length": 4096, "trainer.precision": "bf16"}
    plans = [resolve(make(**words, **{"trainer.float8": each}), 1) for each in (None, "tensorwise", "rowwise")]
    plain, tensorwise, rowwise = (job_of_plan(plan) for plan in plans)
    assert [job.format for job in (plain, tensorwise, rowwise)] == ["bf16", "fp8", "fp8"]
    of_plain, of_tensorwise, of_rowwise = (seconds(job) for job in (plain, tensorwise, rowwise))
    assert 0.4 * of_plain.matmul < of_tensorwise.matmul < 0.7 * of_plain.matmul
    assert of_rowwise.matmul == of_tensorwise.matmul
    assert of_plain.memory_bound < of_tensorwise.memory_bound < of_rowwise.memory_bound
    assert of_plain.head == of_tensorwise.head and of_plain.attention == of_tensorwise.attention
    assert footprint(plain, 0, NOTHING) == footprint(tensorwise, 0, NOTHING)


def test_inductor_loss_has_no_copy_of_the_logits() -> None:
    words = {"model.vocab_size": 32_000, "data.seq_length": 1024, "trainer.micro_batch_size": 1}

    def logits(device: str, precision: str, compiled: bool) -> int:
        more = {"device.name": device, "trainer.precision": precision, "trainer.compile": compiled}
        return footprint(job_of_plan(resolve(make(**words, **more), 1)), 0, NOTHING).logits

    chunk, inductor = 512 * 32_000, ["auto", *(name for name in NAMES if device_named(name).compiler == INDUCTOR)]
    assert {"auto", "cpu"} < set(inductor) < set(DEVICES)
    for device in DEVICES:
        saved = logits(device, "bf16", False) - logits(device, "bf16", True)
        assert saved == (4 * chunk if device in inductor else 0), device
        assert logits(device, "fp32", False) == logits(device, "fp32", True) > 4 * chunk  # fp32 logits need no copy


def test_selective_recomputes_attention_and_elementwise_operations() -> None:
    base, selective = seconds(PLAIN), seconds(replace(PLAIN, recompute="selective"))
    assert selective.matmul == base.matmul and selective.head == base.head
    assert selective.attention == pytest.approx(base.attention * 4.5 / 3.5)
    full = seconds(replace(PLAIN, recompute="full"))
    assert base.memory_bound < selective.memory_bound == full.memory_bound
    assert base.total < selective.total < full.total
    elementwise = seconds(replace(PLAIN, recompute="elementwise"))
    assert elementwise.memory_bound == selective.memory_bound and elementwise.attention == base.attention
    assert full.matmul == pytest.approx(base.matmul * 4 / 3, rel=0.01) and full.head == base.head
    frozen = seconds(replace(PLAIN, lora_parameters=10**6))
    assert frozen.matmul == pytest.approx(base.matmul * 2 / 3, rel=0.05), "no weight gradients"
    third = seconds(replace(PLAIN, recompute="selective", recompute_every=3))
    assert third.attention - base.attention == pytest.approx((selective.attention - base.attention) / 3)


def test_zero_stages_communicate_gradients_and_weights() -> None:
    """Check without overlap: one all-reduce, one reduce-scatter, or one per micro batch."""

    def moved(zero: int, **changes: object) -> float:
        job = replace(PLAIN, dp=8, shard_size=8 if zero else 1, zero=zero, **changes)  # type: ignore[arg-type]
        return step_time(job, devices()["h100"], load_constants() | {"exposed.dp": 1.0}).data_parallel

    count, lanes = PLAIN.stage_parameters(0), 2 * 7 / 8 / devices()["h100"].bus
    gradients, weights = 4 * count * lanes, 2 * count * lanes
    for zero, size in enumerate((gradients, (gradients + weights) / 2, (16 * gradients + weights) / 2)):
        assert moved(zero) == pytest.approx(size, rel=1e-3), zero
    lora = {"lora_parameters": 10**6}
    assert moved(1, **lora) == pytest.approx((lanes * 4 * 32e6 + weights) / 2, rel=0.01), "frozen weights are gathered"
    assert moved(0, exchanges_signs=True) == pytest.approx(gradients / 32, rel=0.01), "1 of 32 bits per value"
    signs = replace(PLAIN, dp=8, zero=0, exchanges_signs=True)
    assert seconds(signs).optimizer > 5 * seconds(replace(signs, exchanges_signs=False)).optimizer


def test_muon_and_qk_clip_add_their_time() -> None:
    plain, spec = replace(PLAIN, dp=8, zero=1, shard_size=8), devices()["h100"]
    flops = seconds(replace(plain, matrix_flops=10**12)).optimizer - seconds(plain).optimizer
    assert flops == pytest.approx(1e12 / (spec.peaks["bf16"] * spec.reach["bf16"]), rel=1e-3)
    sent = seconds(replace(plain, matrix_bytes=1e9)).optimizer - seconds(plain).optimizer
    assert sent == pytest.approx(1e9 * 7 / 8 / spec.bus, rel=0.01)
    spec, plain = devices()["h100"], PLAIN
    added = seconds(replace(plain, records_logits=True)).attention - seconds(plain).attention
    layers = plain.model.num_hidden_layers * plain.num_microbatches
    scores = plain.tokens * plain.seq * plain.model.num_attention_heads / plain.tp / 2
    form = spec.format_used("fp32")
    gemm = 2 * scores * 128 / (spec.peaks[form] * spec.reach[form])
    assert added == pytest.approx(layers * (gemm + 16 * scores / (0.85 * spec.bandwidth)), rel=1e-3)


def test_small_models_are_bound_by_the_host() -> None:
    """Check that a small model's step takes the time of its kernel launches, regardless of their size."""
    tiny = replace(LLAMA, hidden_size=256, num_hidden_layers=16, num_attention_heads=4, intermediate_size=704)
    job = Job(tiny, seq=128, micro_batch=1, num_microbatches=8)
    launches = 8 * 16 * kernel_count(job) * load_constants()["host.operation"] / devices()["h100"].host_speed
    assert seconds(job).total == pytest.approx(launches + load_constants()["launch.step"], rel=0.02)
    assert seconds(replace(job, micro_batch=2)).total == pytest.approx(seconds(job).total, rel=0.02), "twice the work"
    assert seconds(replace(job, recompute="full")).total > 1.2 * seconds(job).total, "more kernels"
    assert seconds(replace(job, kernels="compiled")).total < 0.7 * seconds(job).total, "fewer kernels"
    large, free = replace(PLAIN, micro_batch=4), {**load_constants(), "host.operation": 0.0}
    h100 = devices()["h100"]
    assert step_time(large, h100, free).total == step_time(large, h100, load_constants()).total, "bound by the device"


def test_names_that_programs_and_published_tables_print() -> None:
    pairs = [(spelling, find_device(spelling)) for spelling in GoldenFiles.commands("tools/forecast/spellings.txt")]
    page = "\n".join(f"$ {spelling}\n{device.name if device else 'unknown'}" for spelling, device in pairs)
    GoldenFiles.check("tools/forecast/spellings.txt", page)


@pytest.mark.parametrize("name", devices())
def test_each_device_of_the_table_has_a_forecast(name: str) -> None:
    device = devices()[name]
    assert device.source and device.memory_bytes > 2**34 and device.per_node >= 8
    assert all(0.4 <= share <= 1 for share in device.reach.values())
    assert find_device(name.upper()) == device
    total = seconds(PLAIN, name).total
    # Nothing is faster than its peak.
    assert total > 6 * 6.6e9 * PLAIN.tokens_per_step / device.per_rank().peak("bf16")


RECORDED = Path(__file__).with_name("recorded_machine.json")
SMALL = ("model=llama_15m", "trainer.micro_batch_size=2", "trainer.global_batch_size=4", "data.seq_length=256")


def recorded() -> dict[str, Any]:
    """Return a calibration of one and two ranks of one thread each, in CPU time, and steps timed after it."""
    content: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return content


def machine(**changes: Any) -> Calibration:
    return Calibration(**{**recorded()["machine"], **changes})


def plan_of(*overrides: str, ranks: int = 1) -> Plan:
    words = [*overrides, "data.mock=true", "data.prefixes=[]", "device=cpu", "dry_run=true"]
    return resolve(cli.parse_overrides(words), ranks)


def test_fits_of_lines_and_gemms() -> None:
    assert fit_line([(size, 3e-5 + size * 2e-9) for size in (4e3, 1e5, 1e7)]) == pytest.approx((3e-5, 2e-9))
    assert fit_line([(1.0, 5.0), (2.0, 4.0)])[1] == 0, "the slope is not negative"
    start, each = fit_line([(1.0, 1.0), (2.0, 2.4), (4.0, 5.6)])
    assert start == 0 and each == pytest.approx(1.2, rel=0.15), "the start is not negative"
    shapes = ((256, 288, 864), (512, 768, 288), (2048, 1376, 512))
    assert fit_gemms([(*shape, filled(40, *shape) / 80e9) for shape in shapes]) == pytest.approx((80e9, 40))
    assert fit_gemms([(*shape, filled(0, *shape) / 80e9) for shape in shapes]) == pytest.approx((80e9, 0))


@pytest.mark.parametrize("job", recorded()["steps"], ids=lambda job: job["name"])
def test_recorded_steps_are_forecast_within_20_percent(job: dict[str, Any]) -> None:
    plan = plan_of(*job["overrides"], ranks=job["ranks"])
    assert local_step_time(plan, machine()).total == pytest.approx(job["seconds"], rel=0.20)


def test_each_measurement_affects_its_component() -> None:
    """Double one measurement: only the components that depend on it get longer."""
    base = local_step_time(plan_of(*SMALL), machine())

    def slower(change: str) -> dict[str, float]:
        by_ranks = recorded()["machine"]["by_ranks"]
        of_form = by_ranks["1"]["fp32"]
        if change == "adam":
            by_ranks["1"]["adam"] *= 2
        elif change == "loss":
            of_form["loss"][-1] *= 2
        else:
            of_form[change] = [[*shape, 2 * seconds] for *shape, seconds in of_form[change]]
        parts = local_step_time(plan_of(*SMALL), machine(by_ranks=by_ranks)).parts()
        return {name: parts[name] / seconds for name, seconds in base.parts().items() if seconds}

    assert slower("products")["matmul"] == pytest.approx(2)
    assert slower("attention")["attention"] == pytest.approx(2) and slower("attention")["matmul"] == pytest.approx(1)
    assert slower("pieces")["memory_bound"] > 1.5 and slower("pieces")["attention"] == pytest.approx(1)
    assert slower("loss")["head"] > 1.2 and slower("loss")["matmul"] == pytest.approx(1)
    assert slower("adam")["optimizer"] > 1 and slower("adam")["attention"] == pytest.approx(1)


def test_float8_is_emulated_in_fp32() -> None:
    fp32 = local_step_time(plan_of(*SMALL), machine())
    emulated = local_step_time(plan_of(*SMALL, "trainer.float8=tensorwise"), machine())
    assert emulated.matmul == fp32.matmul and emulated.memory_bound > fp32.memory_bound


def test_collectives_add_to_the_step() -> None:
    """Use two ranks as fast as one, whose collectives take 1 ms and 1 ns per byte."""
    one = recorded()["machine"]["by_ranks"]["1"]
    sizes = (2**12, 2**20, 2**23)
    collectives = {
        mode: {kind: [[size, 1e-3 + size * 1e-9] for size in sizes] for kind in kinds}
        for mode, kinds in COLLECTIVES.items()
    }
    two = {**one, "collectives": collectives}
    both = machine(by_ranks={"1": one, "2": two})
    replicas = local_step_time(plan_of(*SMALL, "trainer.dp=2", "trainer.zero=0", ranks=2), both)
    parameters = 15_191_712
    # Seven units: six blocks, and the rest of the model.
    assert replicas.data_parallel == pytest.approx(4 * parameters * 1e-9 + 7e-3, rel=0.01)
    assert replicas.tensor == replicas.pipeline == replicas.bubble == 0
    halves = local_step_time(plan_of(*SMALL, "trainer.tp=2", ranks=2), both)
    assert halves.matmul < 0.6 * local_step_time(plan_of(*SMALL), both).matmul and halves.tensor > 0
    stages = local_step_time(plan_of(*SMALL, "trainer.pp=2", ranks=2), both)
    assert stages.pipeline > 0 and stages.bubble > 0
    more = local_step_time(plan_of(*SMALL, "trainer.dp=4", "trainer.micro_batch_size=1", ranks=4), both)
    one = local_step_time(plan_of(*SMALL), both)
    assert more.matmul == pytest.approx(one.matmul / 4 * 2, rel=0.1), "4 ranks, 2 cores"


def test_cluster_device_cpu_needs_a_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [*SMALL, "cluster.device=cpu"]
    with pytest.raises(NotCalibrated):
        load_calibration()
    assert main(command) == 2
    assert "scripts/plan.py --calibrate" in capsys.readouterr().err
    calibration_path().parent.mkdir(parents=True)
    calibration_path().write_text("{")
    assert main(command) == 2, "an incomplete file is rejected"
    capsys.readouterr()
    calibration_path().write_text(json.dumps(recorded()["machine"]))
    assert main(command) == 0
    text = capsys.readouterr().out
    assert recorded()["machine"]["date"] in text and "attention" in text and "between nodes" not in text
    lora = [*command, "finetune=lora", "init_from=x"]
    assert main([*command, "cluster.nodes=2"]) == 2
    assert "this machine alone" in capsys.readouterr().err
    assert main(lora) == main([*lora, "trainer.tp=2"]) == 0
    assert main(["--calibrate", "trainer.tp=2"]) == 2


def test_the_operations_of_a_calibration_run() -> None:
    seconds = [measure_machine._gemm(8, 16, 16, torch.float32), measure_machine._attention(1, 8, torch.bfloat16)]
    seconds += [measure_machine._loss(8, torch.float32), measure_machine._adam(64)]
    assert all(each > 0 for each in seconds)
