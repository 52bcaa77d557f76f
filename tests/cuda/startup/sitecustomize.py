"""Python imports this module at start in each process of a run on the runtime. It changes what the run could not do.

* A file of the driver seems to exist: the project looks for one before it imports torch.
* Collectives of Python objects compute the sizes of their buffers on the host, because kernels compute nothing.
* The comparison of weights reads them on the host, for the same reason.
* Steps of a run are marked in the log; values that kernels would compute are replaced (``in_process.py``).
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

DRIVER_FILE = "/dev/nvidiactl"


def pretend_driver_file() -> None:
    exists = os.path.exists
    os.path.exists = lambda path: path == DRIVER_FILE or exists(path)


class AfterImport(MetaPathFinder):
    """Calls a function of ``in_process.py`` with each module of ``actions`` after the module's code has run."""

    def __init__(self, actions: dict[str, str]) -> None:
        self._actions = actions

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._actions:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._followed(spec.loader, self._actions[fullname])  # type: ignore[method-assign]
        return spec

    @staticmethod
    def _followed(loader: Loader, action: str) -> Callable[[ModuleType], None]:
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            getattr(importlib.import_module("tests.cuda.in_process"), action)(module)

        return execute_and_act


if "HOST_CUDA_LIBRARIES" in os.environ:
    pretend_driver_file()
    actions = {
        "torch.distributed.distributed_c10d": "compute_object_collectives_on_the_host",
        "megatron_llama.parallel.compare_copies": "compare_copies_on_the_host",
        "megatron_llama.train.loop": "prepare_steps",
        "torch._inductor.runtime.triton_heuristics": "choose_first_variants",
    }
    sys.meta_path.insert(0, AfterImport(actions))
