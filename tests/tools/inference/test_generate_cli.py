"""scripts/generate.py as a user starts it, in a process forked from this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers.models.auto.tokenization_auto  # noqa: F401  imported before the fork
from safetensors.torch import load_file, save_file

import megatron_llama.tools.inference.chat  # noqa: F401  the same
from tests.checkpoint.runner import Job
from tests.messages import unwrap
from tests.tools.inference.models import CPU, check_refusals, command, generate, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "hf", tie_word_embeddings=True)


def test_prompts(folder: Path) -> None:
    arguments = [folder, *CPU, "--prompt", "the cat", "a dog and a", "--max-new-tokens", 12, "--greedy"]
    one = command(generate, *arguments)
    assert one.status == 0, one.err
    assert one.out.startswith("the cat") and "\n\na dog and a" in one.out
    assert "tokens/s" in one.err
    two = command(generate, *arguments, "--tp", 2)
    assert (two.status, two.out) == (0, one.out), two.err
    first, _, second = one.out.removeprefix("the cat").removesuffix("\n").partition("\n\na dog and a")
    stop = [first[5:7], second[-4:-1]]
    stopped = command(generate, *arguments, "--tp", 2, "--stop", *stop)
    cut = [answer[: min(at for text in stop if (at := answer.find(text)) >= 0)] for answer in (first, second)]
    assert (stopped.status, stopped.out) == (0, f"the cat{cut[0]}\n\na dog and a{cut[1]}\n"), stopped.err


def test_defaults_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    arguments = [tmp_path / "hf", *CPU, "--prompt", "the cat", "--max-new-tokens", 20]
    greedy = command(generate, *arguments, "--greedy").out
    content = {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.5, "num_beams": 4}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(content))
    done = command(generate, *arguments)
    assert "generation_config.json: repetition-penalty 1.5, greedy; not supported: num_beams\n" in done.err, done.err
    assert done.out == command(generate, *arguments, "--greedy", "--repetition-penalty", 1.5).out != greedy
    assert command(generate, *arguments, "--greedy", "--repetition-penalty", 1).out == greedy
    (tmp_path / "hf" / "generation_config.json").write_text('{"top_p": 7}')
    assert command(generate, *arguments).status == 2


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
    layout = ["trainer.steps=0", "trainer.tp=2", "trainer.pp=2"]
    job = Job(tmp_path / "run", "model=from_hf", f"init_from={folder}", *shape, *layout)
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


REFUSALS = [
    f"hf --tp 3 --chat --prompt x --temperature 1e-310 --top-p 1.5 --max-new-tokens 0 --seed {2**64}",
    "nothing --greedy --seed 4 --system x",
    ". --prompt x",
    f"hf --prompt '{'cat ' * 300}' ''",
    "hf --prompt the --top-k -1 --min-p 1.5 --repetition-penalty 0 --stop ''",
    "hf --prompt the caf\udce9",  # the argument's byte is 0xe9
    "bare --chat",
]


def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(folder.with_name("bare"), template=False)
    check_refusals("generate", generate, REFUSALS, folder.parent, monkeypatch, capsys)


def test_a_message_that_is_not_utf8_is_refused_and_the_chat_goes_on(folder: Path) -> None:
    arguments = [folder, *CPU, "--chat", "--max-new-tokens", 8, "--greedy"]
    done = command(generate, *arguments, stdin="caf\udce9\nHello cat\n")
    assert done.status == 0 and "[the message is not UTF-8: byte 0xe9 after 'caf']" in done.err
    assert done.out == command(generate, *arguments, stdin="Hello cat\n").out


def test_a_reader_that_has_gone_is_one_message(folder: Path) -> None:
    done = command(generate, folder, *CPU, "--prompt", "the cat", "--max-new-tokens", 8, reader=False)
    assert done.status == 2 and "the reader closed the pipe" in done.err and "Traceback" not in done.err, done.err
