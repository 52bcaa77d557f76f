"""Stand-in: importing it registers the device and the compiler, which keeps recipes."""

import os
from pathlib import Path

import stand_in.compiler
from stand_in import environment, record

if os.environ.get("PT_HPU_LAZY_MODE") != "0":
    raise RuntimeError("torch.compile needs PT_HPU_LAZY_MODE=0")
stand_in.compiler.register(
    "hpu_backend", lambda: Path(os.environ["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")[0]), ".recipe"
)
record("import habana_frameworks", environment=environment())
