"""What a run needs before it runs: memory by pipeline stage, seconds of a step, what failures take of a long run.

    job = job_of_plan(plan)
    footprint(job, stage=0).total                       # bytes
    step_time(job, find_device("h100"), fitted()).total  # seconds

Formulas without torch and without devices; docs/guides/tools/planning.md has them in words, with their measured errors.
"""
