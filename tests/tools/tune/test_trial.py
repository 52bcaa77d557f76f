"""Trials: processes in place of train.py, with real limits, and a mock SLURM."""

from __future__ import annotations

import resource
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.tools.cluster_settings import TuneConfig
from megatron_llama.tools.tune import trial
from megatron_llama.tools.tune.candidates import Candidate
from megatron_llama.tools.tune.trial import DONE, FAILED, MEMORY, SLOW, TrialOutcome, read_outcome, run_trial
from tests.processes import gone

CANDIDATE = Candidate({}, 1, 1, 0, 1, 0, 1, 1.0, "trainer.tp=1")
Run = Callable[..., TrialOutcome]
HEAD = """
import json, os, sys, time
from pathlib import Path
folder = Path(json.loads(next(w for w in sys.argv if w.startswith("run.dir=")).partition("=")[2]))
count = int(next(w for w in reversed(sys.argv) if w.startswith("trainer.steps=")).partition("=")[2])
def step(number, seconds):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "step_time_s": seconds, "peak_memory_bytes": 1000 + number}) + "\\n")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a trial of a program in place of train.py."""

    def run_program(body: str, best: float | None = None, **settings: object) -> TrialOutcome:
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body))
        monkeypatch.setattr(trial, "ROOT", tmp_path)
        tune = TuneConfig(steps=3, **settings)  # type: ignore[arg-type]
        return run_trial(CANDIDATE, ["model=x"], tune, tmp_path / "a trial", best, 1)

    return run_program


def test_result_is_the_median_without_the_first_step(run: Run) -> None:
    body = "[step(n + 1, [9.0, 2.0, 5.0, 3.0][n]) for n in range(count)]"
    assert run(body) == TrialOutcome(DONE, 3.0, 1004)
    assert run(body) == TrialOutcome(DONE, 3.0, 1004), "files of an earlier start are ignored"


def test_failed_allocation_is_out_of_memory(run: Run) -> None:
    """Use a real limit of address space, as set by ulimit -v."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min(64 << 30, hard) if hard > 0 else 64 << 30, hard))
    try:
        assert run("step(1, 1.0); bytearray(200 << 30)") == TrialOutcome(MEMORY, None, 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("os.kill(os.getpid(), 9)", MEMORY, ""),
        ("sys.exit('rank 1 was killed (often the system was out of memory) by SIGKILL')", MEMORY, ""),
        ("sys.exit('torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB')", MEMORY, ""),
        ("print('  rule  the heaviest rank (pipeline stage 1) needs 9 GiB'); sys.exit(2)", MEMORY, ""),
        ("print('  device = tpu\\n    rule     there is none\\n    instead  x'); sys.exit(2)", FAILED, "there is none"),
        ("raise ValueError('what else')", FAILED, "ValueError: what else"),
        ("sys.exit(1)", FAILED, "no output"),
    ],
)
def test_outcome_of_a_trial(body: str, status: str, message: str, run: Run) -> None:
    assert run(body) == TrialOutcome(status, None, None, message)


def test_slow_trials_are_stopped_with_all_processes(tmp_path: Path, run: Run) -> None:
    body = """
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    (folder / "child").write_text(str(child))
    step(1, 9.0), step(2, 2.5), step(3, 2.7)
    time.sleep(1000)
    """
    assert run(body, best=1.0) == TrialOutcome(SLOW, 2.6, 1003)
    assert gone(int((tmp_path / "a trial" / "child").read_text()))
    assert run("time.sleep(1000)", trial_minutes=0.005).status == SLOW


SBATCH = """\
#!/bin/sh
echo "$MAX_RESTARTS $*" >>{folder}/calls
for word; do case $word in
    --output=*) out=${{word#--output=}};;
    run.dir=*) dir=$(eval echo ${{word#run.dir=}});;
esac; done
echo '{{"step": 1, "step_time_s": 9, "peak_memory_bytes": 5}}' >>"$dir/metrics.jsonl"
echo '{{"step": 2, "step_time_s": 2, "peak_memory_bytes": 5}}' >>"$dir/metrics.jsonl"
echo "{output}" >"$out"
echo 7
"""
SCONTROL = """\
#!/bin/sh
[ -e {folder}/looked ] || {{ touch {folder}/looked; echo "JobId=7 JobState=RUNNING"; exit; }}
echo "JobId=7 JobState={state} ExitCode={code}"
"""


@pytest.mark.parametrize(
    ("state", "code", "output", "status"),
    [
        ("COMPLETED", "0:0", "", DONE),
        ("OUT_OF_MEMORY", "0:125", "", MEMORY),
        ("FAILED", "1:0", "killed (often the system was out of memory) by SIGKILL", MEMORY),
        ("FAILED", "0:9", "", MEMORY),
        ("FAILED", "1:0", "no such partition", FAILED),
    ],
)
def test_jobs(state: str, code: str, output: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("scancel", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(text.format(folder=tmp_path, state=state, code=code, output=output))
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    tune = TuneConfig(jobs=True, sbatch="--partition gpu")
    outcome = run_trial(CANDIDATE, ["model=x"], tune, tmp_path / "trial", None, 4)
    assert outcome.status == status and outcome.seconds == (2.0 if status == DONE else None)
    call = (tmp_path / "calls").read_text()
    assert call.startswith("0 --parsable --nodes=4 --no-requeue ") and "--partition gpu run.slurm model=x" in call


def test_jobs_need_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete line of metrics is ignored."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for options in ("", "--comment 'x"):
        with pytest.raises(ConfigError, match="cannot start sbatch"):
            run_trial(CANDIDATE, [], TuneConfig(jobs=True, sbatch=options), tmp_path / "trial", None, 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "step_time_s": 1, "peak_memory_bytes": 2}\n{"step": 2, "st')
    assert read_outcome(None, SLOW, tmp_path) == TrialOutcome(SLOW, None, 2)
