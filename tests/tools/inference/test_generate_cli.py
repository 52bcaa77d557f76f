"""scripts/generate.py as a user starts it, in a process forked from this one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers.models.auto.tokenization_auto  # noqa: F401  imported before the fork
from safetensors.torch import load_file, save_file

import megatron_llama.tools.inference.chat  # noqa: F401  the same
from tests.checkpoint.jobs import Job
from tests.cpu import children_cpu_seconds
from tests.messages import unwrap
from tests.paths import SCRIPTS
from tests.tools.inference.commands import CPU, command, generate
from tests.tools.inference.models import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "hf", tie_word_embeddings=True)


@pytest.mark.parametrize("script", ["generate.py", "evaluate.py"])
def test_help_is_quick(script: str) -> None:
    with children_cpu_seconds(5.0):
        done = subprocess.run([sys.executable, SCRIPTS / script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "CHECKPOINT" in done.stdout
    module = f"megatron_llama.tools.inference.{script[:-3]}_cli"
    code = f"import sys; from {module} import parser; parser(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS.parent).returncode == 0


def test_prompts(folder: Path) -> None:
    arguments = [folder, *CPU, "--prompt", "the cat", "a dog and a", "--max-new-tokens", 12, "--greedy"]
    one = command(generate, *arguments)
    assert one.status == 0, one.err
    assert one.out.startswith("the cat") and "\n\na dog and a" in one.out
    assert "tokens/s" in one.err
    two = command(generate, *arguments, "--tp", 2)
    assert (two.status, two.out) == (0, one.out), two.err


def test_infinite_weights_end_with_their_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, file, {"format": "pt"})
    done = command(generate, tmp_path / "hf", *CPU, "--prompt", "the cat")
    assert done.status == 1 and "model.norm.weight has inf at [3]" in unwrap(done.err), done.err
    assert "Traceback" not in done.err


def test_chat(folder: Path) -> None:
    arguments = [folder, *CPU, "--chat", "--system", "answer", "--max-new-tokens", 8, "--greedy"]
    done = command(generate, *arguments, stdin="Hello cat\nHello cat\n\n/reset\nHello cat\n")
    assert done.status == 0, done.err
    single = command(generate, *arguments, stdin="Hello cat").out
    # After a reset the same question has the same answer; as a second question it has another.
    assert len(single) > 4 and done.out.startswith(single) and done.out.endswith(single)
    middle = done.out[len(single) : -len(single)]
    assert middle and middle != single
    assert "[new conversation]" in done.err
    assert command(generate, *arguments, "--tp", 2, stdin="Hello cat").out == single


def test_a_conversation_that_is_full(folder: Path) -> None:
    arguments = [folder, *CPU, "--chat", "--max-new-tokens", 4]
    done = command(generate, *arguments, stdin="cat " * 200 + "\nHello\n")
    assert done.status == 0 and "the model 128 positions; type /reset" in done.err
    assert done.out  # the message that did not fit was dropped


def test_a_checkpoint_of_any_layout_is_read_as_it_is(folder: Path, tmp_path: Path) -> None:
    # A separate job: forked processes would lack torch's threads once they are used here.
    shape = ["model.vocab_size=290", "model.num_hidden_layers=3", "model.tie_word_embeddings=true"]
    job = Job(
        tmp_path / "run",
        "model=from_hf",
        f"init_from={folder}",
        *shape,
        "trainer.steps=0",
        "trainer.tp=2",
        "trainer.pp=2",
    )
    assert job.wait() == 0, job.output
    arguments = [*CPU, "--prompt", "the cat sat", "--greedy", "--max-new-tokens", 16]
    theirs = command(generate, folder, *arguments)
    assert theirs.status == 0
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000000"):
        ours = command(generate, path, *arguments)
        assert (ours.status, ours.out) == (0, theirs.out), ours.err
    weights = next((tmp_path / "run" / "checkpoints" / "step_00000000").glob("rank_00001.*"))
    content = bytearray(weights.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first value
    weights.write_bytes(content)
    broken = command(generate, tmp_path / "run", *arguments)
    assert broken.status == 1 and "wrong hash of" in broken.err


def test_all_problems_are_reported_together(folder: Path, tmp_path: Path) -> None:
    done = command(
        generate, folder, *CPU, "--tp", 3, "--chat", "--prompt", "x", "--temperature", 1e-310, "--top-p", 1.5,
        "--max-new-tokens", 0, "--seed", 2**64,
    )  # fmt: skip
    assert done.status == 2 and "Traceback" not in done.err
    for named in ("--tp", "--chat", "--temperature", "--top-p", "--max-new-tokens", "--seed", "8 reasons"):
        assert named in done.err, named
    done = command(generate, tmp_path / "nothing", *CPU, "--greedy", "--seed", 4, "--system", "x")
    assert done.status == 2
    for named in ("folder not found", "--seed", "--system", "--prompt"):
        assert named in done.err, named
    done = command(generate, folder, *CPU, "--prompt", "cat " * 300, "")
    assert (
        done.status == 2
        and "128 positions" in " ".join(done.err.split())
        and "has no token" in " ".join(done.err.split())
    )
    assert command(generate, tmp_path, *CPU, "--prompt", "x").status == 2


def test_chat_without_a_template(tmp_path: Path) -> None:
    plain = make_folder(tmp_path / "plain", template=False)
    done = command(generate, plain, *CPU, "--chat", stdin="Hello\n")
    assert done.status == 2 and "has no chat template" in " ".join(done.err.split())


def test_a_prompt_that_is_not_utf8(folder: Path) -> None:
    latin = "caf\udce9"  # as Python gives an argument with the byte 0xe9
    done = command(generate, folder, *CPU, "--prompt", "the cat", latin, "--max-new-tokens", 2)
    assert done.status == 2 and "Traceback" not in done.err
    assert "is not UTF-8: byte 0xe9 after 'caf'" in done.err and "the cat" not in done.err


def test_a_message_that_is_not_utf8_is_refused_and_the_chat_goes_on(folder: Path) -> None:
    arguments = [folder, *CPU, "--chat", "--max-new-tokens", 8, "--greedy"]
    done = command(generate, *arguments, stdin="caf\udce9\nHello cat\n")
    assert done.status == 0 and "[the message is not UTF-8: byte 0xe9 after 'caf']" in done.err
    assert done.out == command(generate, *arguments, stdin="Hello cat\n").out


def test_a_reader_that_has_gone_is_one_message(folder: Path) -> None:
    done = command(generate, folder, *CPU, "--prompt", "the cat", "--max-new-tokens", 8, reader=False)
    assert done.status == 2 and "the reader closed the pipe" in done.err and "Traceback" not in done.err, done.err
