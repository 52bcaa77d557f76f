"""On the path of a job, this makes one rank fail in its second step: the test of what the job's log then says."""

import builtins
import os
import sys

if "SABOTAGE_RANK" in os.environ and os.environ.get("SLURM_PROCID") == os.environ["SABOTAGE_RANK"]:
    original = builtins.__import__

    def patched(name, *arguments):
        module = original(name, *arguments)
        loop = sys.modules.get("megatron_llama.train.loop")
        if loop is not None and hasattr(loop, "training_step") and not hasattr(loop, "sabotaged"):
            step = loop.training_step

            def fail(number, *more):
                if number == 2:
                    raise ZeroDivisionError(f"sabotage on rank {os.environ['RANK']}")
                return step(number, *more)

            loop.training_step, loop.sabotaged = fail, True
        return module

    builtins.__import__ = patched
