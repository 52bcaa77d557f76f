"""Forecasts of a run: memory of each pipeline stage, time of a step, goodput with failures.

    job = job_of_plan(plan)
    footprint(job, stage=0).total                       # bytes
    step_time(job, find_device("h100"), load_constants()).total  # seconds

The formulas need neither torch nor a device. docs/guides/tools/planning.md states them, with their measured errors.
"""
