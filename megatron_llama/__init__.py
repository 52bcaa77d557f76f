"""Megatron-style 3D-parallel training of Llama models."""

import sys
import warnings
from types import ModuleType

from megatron_llama.system.interrupts import exit_on_early_interrupt, is_own_program

exit_on_early_interrupt()  # before all other imports, during which the signal may arrive

from megatron_llama.system.missing_packages import report_missing_packages  # noqa: E402

report_missing_packages()  # before other imports, which may be of missing packages

# python -W error: a warning of another package is printed and does not end a program, because its user cannot fix it.
if "error" in sys.warnoptions and is_own_program():
    warnings.filterwarnings("default", module=r"(?!(megatron_llama|data_prep|benchmarks|scripts|__main__)\b)")
    # Raised in destructors: Python only prints it.
    warnings.simplefilter("ignore", ResourceWarning)

# Warnings on which users cannot act, printed by each rank: megatron-core's about packages that are not used here, and
# torch's about deprecated functions that megatron-core and fully_shard call.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b")
# Raised by the compiler of Python 3.12, without bytecode: the module's name is then a path.
warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning, r".*\bmegatron\Wcore\b")
warnings.filterwarnings(
    "ignore", category=FutureWarning, message=r".*torch\.distributed\.(reduce_scatter_tensor|all_gather_into)"
)
# With one rank, megatron-core's reduction returns its input, so the embedding's output is a view. It is not modified.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w*VocabParallelEmbedding\) returned a view")

# At import, megatron-core passes functions that are not used here to torch.compile, which loads Inductor: one second
# and 44 MB per process. Its switch is read at import, so a replacement module is installed first. The router of 0.19
# ignores the switch and loads Inductor.
_jit = ModuleType("megatron.core.jit")
vars(_jit).update(dict.fromkeys(("jit_fuser", "noop_decorator"), lambda function: function))
vars(_jit).update(dict.fromkeys(("enable_jit_fuser", "disable_jit_fuser"), lambda: None))
sys.modules.setdefault(_jit.__name__, _jit)
