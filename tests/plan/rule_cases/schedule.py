"""Cases of plan/rules/schedule.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import FILES, Case

CASES = [
    Case(
        "profiled_steps_are_run",
        1,
        {"trainer.profile": [9, 11], "trainer.steps": 10},
        {"trainer.profile": [9, 10], "trainer.steps": 10},
        "trainer.profile=[9,10]",
    ),
    Case(
        "best_has_a_loss",
        1,
        {"checkpoint.keep_best": True, "checkpoint.every_steps": 20},
        {"checkpoint.keep_best": True, "checkpoint.every_steps": 20, "trainer.val_every_steps": 10},
        "trainer.val_every_steps=20",
    ),
    Case(
        "best_has_a_loss",
        1,
        {"checkpoint.keep_best": True, "checkpoint.every_steps": 33, "trainer.val_every_steps": 40},
        {"checkpoint.keep_best": True, "trainer.val_every_steps": 50},
        "checkpoint.every_steps=40",
    ),
    Case(
        "rewinds_have_checkpoints",
        1,
        {"trainer.spike_guard": "rewind", "checkpoint.every_minutes": 0.0},
        {"trainer.spike_guard": "rewind"},
        "checkpoint.every_steps=100",
    ),
    Case("schedule_fits_run", 1, {"optim.warmup_steps": 101}, {"optim.warmup_steps": 100}, "optim.warmup_steps=100"),
    Case(
        "schedule_fits_run",
        1,
        {"optim.warmup_steps": 20, "optim.constant_steps": 81},
        {"optim.warmup_steps": 20, "optim.constant_steps": 80},
        "optim.warmup_steps=19",
    ),
    Case(
        "schedule_fits_run", 1, {"optim.constant_steps": 101}, {"optim.constant_steps": 100}, "optim.constant_steps=100"
    ),
    Case(
        "epochs_or_steps",
        1,
        {**FILES, "trainer.epochs": 2, "trainer.steps": 7},
        {**FILES, "trainer.epochs": 2},
        "trainer.epochs=null",
    ),
    Case(
        "epochs_or_steps",
        1,
        {**FILES, "trainer.epochs": 2, "data.schedule": [{"samples": 100, "prefixes": ["y"]}]},
        {**FILES, "trainer.epochs": 2},
        "trainer.epochs=null",
    ),
    Case("epochs_or_steps", 1, {"trainer.epochs": 2}, {"trainer.steps": 2}, "trainer.epochs=null"),
    Case(
        "epochs_or_steps",
        1,
        {**FILES, "data.prefixes": [1, "x"], "trainer.epochs": 2},
        {**FILES, "data.prefixes": ["x", "y"], "trainer.epochs": 2},
        "without weights",
    ),
    Case(
        "one_warmup",
        1,
        {"optim.warmup_ratio": 0.1, "optim.warmup_steps": 5},
        {"optim.warmup_ratio": 0.1},
        "optim.warmup_ratio=null",
    ),
    Case("lr_falls", 1, {"optim.min_lr": 1e-3}, {"optim.min_lr": 3e-4}, "optim.min_lr=3e-05"),
    Case(
        "schedule_has_a_class",
        1,
        {"optim.schedule": {"max_steps": 3}},
        {"optim.schedule": {"_target_": "megatron_llama.optim.schedules.Constant"}},
        "optim=cosine",
    ),
    Case(
        "schedule_may_be_built",
        1,
        {"optim.schedule": {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": [{"_target_": "os.abort"}]}},
        {"optim.schedule": {"_target_": "torch.optim.lr_scheduler.LambdaLR"}},
        "allow_targets=[os.abort]",
    ),
]
