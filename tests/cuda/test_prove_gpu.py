"""scripts/prove_gpu.py runs to its end on the runtime: all parts, the table, the page and the exit status.

Kernels compute nothing, so the parts that compare numbers fail here. tests/tools/prove_gpu has their verdicts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_llama.tools.prove_gpu.cli import parts
from tests.cuda.harness import Runtime
from tests.paths import SCRIPTS

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_the_command_runs_to_its_end(runtime: Runtime, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    words = [str(SCRIPTS / "prove_gpu.py"), "--small", "--minutes", "6", "--output", str(folder)]
    run = runtime.start([words], tmp_path, 2, {})
    assert run.status == 1, run.output[-4000:]  # a part failed, and the command did not
    record = json.loads((folder / "results.json").read_text())
    names = [part.name for part in parts()]
    assert [part["name"] for part in record["parts"]] == names
    table = [line for line in run.output.splitlines() if line.split(" ")[0] in names]
    assert len(table) == len(names) and max(map(len, table)) <= 79
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["device"] == "cuda" and facts["count"] == 2 and len(facts["cards"]) == 2
    (page,) = folder.glob("gpu-*.md")
    text = page.read_text()
    assert all(f"\n## {name.capitalize()}\n" in text for name in names)
    assert str(Path.home()) + "/" not in text and str(SCRIPTS.parent) not in text
    unexpected = re.findall(r"^.*(?:Traceback|AttributeError|NameError|KeyError|TypeError).*$", text, re.MULTILINE)
    assert not unexpected, "faults of the command, not of the runtime"
    assert list(folder.glob("smoke/metrics.jsonl"))
