"""Megatron-style 3D-parallel training of Llama models, from one core to a thousand accelerators."""

import sys
import warnings
from types import ModuleType

from megatron_llama.system.installed import report_missing_packages

report_missing_packages()  # first: what is imported next may be what is missing

# What megatron-core says at import about packages that we don't use, and torch about names that megatron-core and
# fully_shard call: nobody who trains can act on it, and each rank would say it.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b")
warnings.filterwarnings(
    "ignore", category=FutureWarning, message=r".*torch\.distributed\.(reduce_scatter_tensor|all_gather_into)"
)
# The embedding's output is a view where megatron-core's reduction over one rank returns its input. Nothing here writes
# into it.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w*VocabParallelEmbedding\) returned a view")

# megatron-core hands functions that nothing here calls to torch.compile while it is imported. That loads Inductor: one
# second and 44 MB in each process. Its own switch comes too late, so the module with the switch is put in place first.
# The router of 0.19 doesn't ask the switch: there Inductor is loaded.
_jit = ModuleType("megatron.core.jit")
vars(_jit).update(dict.fromkeys(("jit_fuser", "noop_decorator"), lambda function: function))
vars(_jit).update(dict.fromkeys(("enable_jit_fuser", "disable_jit_fuser"), lambda: None))
sys.modules.setdefault(_jit.__name__, _jit)
