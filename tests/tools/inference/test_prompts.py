"""Prompts have the ids of training, in this program and in others that read an export."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.sft import main as prepare
from megatron_llama.config import Config, ConfigError
from megatron_llama.config.settings import DataConfig
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.data.checks import check_data
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import (
    NAMED_TEMPLATES,
    TrainedTemplate,
    add_stop_token,
    trained_template,
    write_trained_template,
)
from megatron_llama.text.conversation import Turn
from megatron_llama.text.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer, open_tokenizer
from megatron_llama.tools.inference import chat
from megatron_llama.tools.inference.chat import ChatSession, PromptBuilder, open_prompt_builder
from megatron_llama.tools.inference.generator import Answer
from megatron_llama.tools.inference.sampling import Sampling, StopTexts
from tests.tools.inference.models import train_sentencepiece, write_tokenizer

pytest.importorskip("tokenizers", reason="Hugging Face tokenizers are an extra")
TALK = [
    {"role": "system", "content": "answer "},
    {"role": "user", "content": " the cat é?\n"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": "a dog"},
    {"role": "assistant", "content": "and a cat"},
]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``plain`` and ``bos``: tokenizers without and with tokens around every text, one with chatml's tokens too;
    ``pieces.model``."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    root = tmp_path_factory.mktemp("tokenizers")
    for name in ("plain", "bos"):
        write_tokenizer(root / name, template=True)
    tokenizer = Tokenizer.from_file(str(root / "bos" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|begin|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    added = [(name, tokenizer.token_to_id(name)) for name in ("<|begin|>", "<|endoftext|>")]
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A <|endoftext|>", special_tokens=added)
    tokenizer.save(str(root / "bos" / "tokenizer.json"))
    settings = json.loads((root / "bos" / "tokenizer_config.json").read_text())
    (root / "bos" / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|begin|>"}))
    train_sentencepiece(root / "pieces")
    return root


def text_of(path: Path) -> Tokenizer:
    return HuggingFaceTokenizer(path) if path.is_dir() else SentencePieceTokenizer(path)


def example(tokenizer: Path, tmp_path: Path, *options: str) -> tuple[list[int], list[int], TrainedTemplate | None]:
    """Return (ids, mask, manifest's template) of TALK, as prepared by data_prep/sft.py."""
    source, prefix = tmp_path / "talk.jsonl", tmp_path / "set"
    tmp_path.mkdir(exist_ok=True)
    source.write_text(json.dumps({"messages": TALK}) + "\n")
    made = ["--input", source, "--tokenizer-model", tokenizer, "--seq-length", 512, "--output-prefix", prefix]
    assert prepare([str(part) for part in (*made, *options, "--workers", 1)]) == 0
    ids, mask = (IndexedDataset(f"{prefix}_sft{end}").document(0).tolist() for end in ("", "_mask"))
    return ids, mask, trained_template({"data": {"kind": "sft", "prefixes": [f"{prefix}_sft"]}})


@pytest.mark.parametrize("name", ["plain", "bos", "pieces.model"])
@pytest.mark.parametrize("template", ["own", *sorted(NAMED_TEMPLATES)])
def test_prompts_are_those_of_training(folders: Path, tmp_path: Path, template: str, name: str) -> None:
    """Check that the ids before each answer of a conversation are its prompt, with BOS."""
    path = folders / name
    if template == "own" and not path.is_dir():
        with pytest.raises(ConfigError, match=r"has\s+no\s+chat\s+template"):
            PromptBuilder(text_of(path), TrainedTemplate("own"))
        return
    if template == "chatml" and name != "bos":
        with pytest.raises(UserError, match=r"ends answers with <\|im_end\|>.* does not have"):
            example(path, tmp_path, "--chat-template", template)
        return
    ids, mask, trained = example(path, tmp_path, "--chat-template", template)
    assert trained is not None and trained.template == template
    prompts = pickle.loads(pickle.dumps(open_prompt_builder(text_of(path), None, trained, "own")))
    starts = [position for position in range(1, len(ids)) if mask[position] and not mask[position - 1]]
    assert len(starts) == 2
    for start, turn in zip(starts, (2, 4), strict=True):
        assert prompts.ids(TALK[:turn]) == ids[:start]
        end = start + mask[start:].index(1)
        while end < len(ids) and mask[end]:
            end += 1
        learned = prompts.ids(TALK[:turn], TALK[turn]["content"])[start:]
        assert learned == ids[start : start + len(learned)]
        written = ids[start:end]
        assert written[-1] in prompts.stop, "it does not stop where its answers end"
        assert prompts.parse_answer(written[:-1]) == TALK[turn]["content"]


@pytest.mark.parametrize("option", ["--add-bos", "--no-add-bos"])
def test_the_manifest_says_whether_bos_comes_first(folders: Path, tmp_path: Path, option: str) -> None:
    for name in ("bos", "pieces.model"):
        ids, mask, trained = example(folders / name, tmp_path / name, "--chat-template", "plain", option)
        prompts = open_prompt_builder(text_of(folders / name), None, trained, "own")
        assert prompts.ids(TALK[:2]) == ids[: mask.index(1)]
        other = open_prompt_builder(text_of(folders / name), "dialogue", trained, "own")  # not what it was trained with
        begin, *rest = text_of(folders / name).encode("x") if name == "bos" else [1]
        assert rest == (text_of(folders / name).encode_text("x") if name == "bos" else []), "no end-of-text id"
        assert (other.ids(HELLO)[0] == begin) == (name == "bos")
        assert (ids[0] == begin) == (option == "--add-bos")


def test_a_training_template_is_the_exported_one(folders: Path, tmp_path: Path) -> None:
    """Only ``data.any_template`` accepts another one, and then an export keeps the tokenizer's."""
    other = Path(shutil.copytree(folders / "plain", tmp_path / "other"))
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] += " "
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("own", "plain"):
        example(folders / "plain", tmp_path / name, "--chat-template", name)
    one_template, two = [f"{tmp_path}/own/set_sft"], [f"{tmp_path}/plain/set_sft", f"{tmp_path}/own/set_sft"]
    for prefixes, tokenizer, message in (
        (one_template, folders / "plain", None),
        (two[:1], other, None),
        (one_template, other, "was rendered with another chat template than that in"),
        (two, folders / "plain", "another chat template than .*plain/set_sft; an export has only one"),
    ):
        data = DataConfig(kind="sft", prefixes=prefixes, seq_length=512, split="1,0,0", tokenizer=str(tokenizer))
        problems = check_data(Config(data=data))
        assert re.search(message or "^$", "".join(problem.rule for problem in problems)), problems
        assert check_data(Config(data=replace(data, any_template=True))) == []


def test_which_template(folders: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "gone_sft")
    data: dict[str, Any] = {"kind": "sft", "prefixes": [prefix], "chat_template": "prompter"}
    assert trained_template({"data": data}) == TrainedTemplate("prompter")  # the set is gone
    assert trained_template({"data": {**data, "kind": "pretrain"}}) is None and trained_template({}) is None
    for number, template in enumerate(("plain", "dialogue")):
        options = {"chat_template": template, "add_bos": False}
        (tmp_path / f"{number}_sft.json").write_text(json.dumps({"options": options}))
    sets = [str(tmp_path / "0_sft"), str(tmp_path / "1_sft")]
    assert trained_template({"data": {**data, "prefixes": sets[:1]}}) == TrainedTemplate("plain", False)
    assert trained_template({"data": {**data, "prefixes": [0.5, sets[1], 0.5, sets[1]]}}) == TrainedTemplate(
        "dialogue", False
    )
    assert trained_template({"data": {**data, "prefixes": sets}}) is None  # they disagree: the user must say
    text = text_of(folders / "plain")
    assert open_prompt_builder(text, None, None, "own").template == "own"
    assert open_prompt_builder(text, None, TrainedTemplate("plain", False), "own").template == "plain"
    assert open_prompt_builder(text, "chatml", TrainedTemplate("plain", False), "own").template == "chatml"


def test_the_own_template_is_found_where_preparation_finds_it(folders: Path, tmp_path: Path) -> None:
    """In chat_template.json too, and its end is learned from it."""
    write_tokenizer(tmp_path, template=False)
    with pytest.raises(ConfigError, match=r"has\s+no\s+chat\s+template"):
        PromptBuilder(HuggingFaceTokenizer(tmp_path), TrainedTemplate("own"))
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|user|>{% endfor %}"
    source += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    prompts = PromptBuilder(HuggingFaceTokenizer(tmp_path), TrainedTemplate("own"))
    assert prompts.tokenizer.decode(prompts.ids(HELLO), skip_special=False) == "<|user|>Hello<|user|><|assistant|>"
    assert prompts.stop == {2} and prompts.ids(HELLO)[0] == 2  # <|user|> is one id
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ raise_exception('no') }}"}))
    with pytest.raises(ConfigError, match=r"rejects\s+this\s+conversation"):
        PromptBuilder(HuggingFaceTokenizer(tmp_path), TrainedTemplate("own")).ids(HELLO)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ '' }}"}))
    for content, rule in (("Hello", r"is\s+not\s+in\s+its\s+text"), (" ", r"its\s+text\s+has\s+no\s+token")):
        with pytest.raises(ConfigError, match=rule):
            prompts = PromptBuilder(HuggingFaceTokenizer(tmp_path), TrainedTemplate("own"))
            prompts.ids([{"role": "user", "content": content}])


@pytest.mark.parametrize("name", ["plain", "bos"])
@pytest.mark.parametrize("template", sorted(NAMED_TEMPLATES))
def test_others_render_an_exported_template_alike(folders: Path, template: str, name: str) -> None:
    from transformers import AutoTokenizer

    prompts = PromptBuilder(text_of(folders / name), TrainedTemplate(template))
    theirs = AutoTokenizer.from_pretrained(str(folders / name))
    source = NAMED_TEMPLATES[template].jinja(prompts.tokenizer, bool(prompts._bos))
    for turns, ask in ((TALK[:1], True), (TALK[:2], True), (TALK[:4], True), (TALK, False)):
        text = theirs.apply_chat_template(turns, chat_template=source, tokenize=False, add_generation_prompt=ask)
        ids = theirs.apply_chat_template(turns, chat_template=source, add_generation_prompt=ask, return_dict=False)
        if ask:
            assert ids == prompts.ids(turns)
            spans = NAMED_TEMPLATES[template].ask([Turn(turn["role"], turn["content"]) for turn in turns])
            shown = "".join(span.text for span in spans)
            begin = "<|begin|>" if name == "bos" else ""
            assert text == begin + shown.replace("<|endoftext|>", "<|endoftext|>" if begin else "<|end|>")
        else:
            assert ids[: len(prompts.ids(turns[:-1]))] == prompts.ids(turns[:-1])


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_an_export_says_it_to_others(folders: Path, tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    hf = tmp_path / "hf"
    shutil.copytree(folders / "bos", hf)
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    end = write_trained_template({"data": {"kind": "sft", "prefixes": [], "chat_template": name}}, hf)
    if end is not None:
        add_stop_token(hf / "generation_config.json", end)
    theirs = transformers.AutoTokenizer.from_pretrained(str(hf))
    prompts = PromptBuilder(text_of(folders / "bos"), TrainedTemplate(name))
    rendered = theirs.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert rendered == prompts.ids(HELLO), "without a manifest the tokenizer decides on BOS"
    assert rendered[0] == theirs.convert_tokens_to_ids("<|begin|>")
    ends = json.loads((hf / "generation_config.json").read_text())["eos_token_id"]
    assert set([ends] if isinstance(ends, int) else ends) == {0, *prompts.stop}


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("template", ["dialogue", "plain"])
def test_an_export_of_llamas_tokenizer_says_it_to_others(tmp_path: Path, template: str, is_json: bool) -> None:
    from transformers import AutoTokenizer

    train_sentencepiece(tmp_path / "tokenizer", normalization_rule_name="identity", remove_extra_whitespaces=False)
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if is_json:
        AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    prompts = PromptBuilder(open_tokenizer(tmp_path), TrainedTemplate(template))
    write_trained_template({"data": {"kind": "sft", "prefixes": [], "chat_template": template}}, tmp_path)
    ours = PromptBuilder(open_tokenizer(tmp_path), TrainedTemplate("own"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for turns in (TALK[:2], TALK[:4]):
        ids = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert ids == ours.ids(turns) == prompts.ids(turns)
    if is_json:  # other classes ignore the flag
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "legacy": 1}')
        other = AutoTokenizer.from_pretrained(tmp_path).encode("a</s>b", add_special_tokens=False)
        assert other == open_tokenizer(tmp_path).spans("a</s>b", parse_special=True).ids


def test_a_run_with_the_own_template_only_adds_its_end(folders: Path, tmp_path: Path) -> None:
    """Qwen 2.5's base ends turns with a token other than eos. The end may be an added token that is not special."""
    shutil.copytree(folders / "bos", tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    for token in settings["added_tokens"]:
        token["special"] = token["content"] != "<|end|>"
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(settings))
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert PromptBuilder(HuggingFaceTokenizer(tmp_path / "hf"), TrainedTemplate("own")).stop == {0}
    for data, written in (({"kind": "sft", "prefixes": [], "chat_template": "own"}, 0), ({"kind": "pretrain"}, None)):
        assert write_trained_template({"data": data}, tmp_path / "hf") == written
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before


def test_calls_in_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result goes to the call of its position; the model is asked when all calls have one."""
    write_tokenizer(tmp_path, template=False)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }}>{% endfor %}"
        "{{ m.tool_call_id }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = HuggingFaceTokenizer(tmp_path)
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    prompts = open_prompt_builder(tokenizer, None, None, "own", tools=tools)
    calls = [{"name": name, "arguments": {"n": number}} for number, name in enumerate(("one", "two"))]
    answers, prompts_of = [json.dumps(calls), "Done."], []

    def generate(ids: list[list[int]], *_: object) -> list[Answer]:
        prompts_of.append(tokenizer.decode(ids[0]))
        return [Answer(tokenizer.encode(answers[len(prompts_of) - 1]))]

    monkeypatch.setattr(chat, "dist", SimpleNamespace(get_rank=lambda: 0))
    monkeypatch.setattr(chat, "broadcast_from_rank_0", lambda make: make())
    generator: Any = SimpleNamespace(generate=generate, context=1000)
    out = io.StringIO()
    session = ChatSession(generator, prompts, Sampling(), 8, StopTexts(tokenizer, []), None)
    session.run(io.StringIO("go\n/tool 1st\n/tool\n"), out)
    made = '<one {"n": 0} call00000><two {"n": 1} call00001>'
    assert prompts_of[1] == f"one;two;user:go;assistant:{made};tool:1stcall00000;tool:call00001;assistant:"
    assert '[call one {"n": 0}]\n[call two {"n": 1}]\n' in out.getvalue()
