"""With a cache, without one, in transformers, on several ranks, in a batch and alone: the same ids."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_llama.devices import device_named
from megatron_llama.tools.inference.evaluation import EncodedRecord, label_scores
from megatron_llama.tools.inference.generator import Answer, Generator
from megatron_llama.tools.inference.sampling import Sampling
from tests.ranks import run_ranks
from tests.tools.inference.models import NOTHING, PROMPTS, make_folder, with_generator

GREEDY, DRAWN = Sampling(greedy=True), Sampling(temperature=1.3, top_p=0.9)
COUNT = 40  # past rope scaling's original context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "hf")


def write(
    folder: Path,
    prompts: list[list[int]] = PROMPTS,
    sampling: Sampling = GREEDY,
    tp: int = 1,
    stop: frozenset[int] = NOTHING,
    count: int = COUNT,
    cp: int = 1,
) -> list[Answer]:
    """The answers, the same on all ranks."""
    ranks = with_generator(lambda made: made.generate(prompts, sampling, count), folder, tp, stop, cp=cp)
    assert all(answers == ranks[0] for answers in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[list[int]]:
    answers = [answer.ids for answer in write(folder)]
    assert all(len(set(ids)) > 10 for ids in answers), "equal ids would show nothing"
    return answers


@pytest.fixture(scope="module")
def drawn(folder: Path) -> list[Answer]:
    return write(folder, sampling=DRAWN)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_ids_that_the_tokenizer_lacks_are_never_generated(
    folder: Path, greedy: list[list[int]], sampling: Sampling, tp: int
) -> None:
    missing = sorted({number for answer in greedy for number in answer})[::2]
    ranks = with_generator(lambda made: made.generate(PROMPTS, sampling, 12), folder, tp, missing=missing)
    assert not {number for answer in ranks[0] for number in answer.ids} & {*missing}


def _theirs(rank: int, folder: Path, **more: float) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(folder).eval()
    common = {"do_sample": False, "max_new_tokens": COUNT, "min_new_tokens": COUNT, "eos_token_id": None} | more
    return [
        llama.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), **common)[0, len(p) :].tolist()
        for p in PROMPTS
    ]


def test_as_transformers_generates(folder: Path, greedy: list[list[int]]) -> None:
    assert run_ranks(_theirs, 1, folder)[0] == greedy


def test_a_repetition_penalty_as_transformers_applies_it(folder: Path, greedy: list[list[int]]) -> None:
    answers = [answer.ids for answer in write(folder, sampling=replace(GREEDY, repetition_penalty=1.4), tp=2)]
    assert answers == run_ranks(partial(_theirs, repetition_penalty=1.4), 1, folder)[0] and answers != greedy


@pytest.mark.parametrize(
    ("model_type", "layout"), [("qwen2", {"tp": 2}), ("qwen3", {"tp": 4}), ("qwen3", {"cp": 2}), ("olmo2", {"tp": 4})]
)
def test_other_types_as_transformers_generates(
    model_type: str, layout: dict[str, int], tmp_path: Path, greedy: list[list[int]]
) -> None:
    folder = make_folder(tmp_path / "hf", model_type=model_type)
    ranks = with_generator(lambda made: made.generate(PROMPTS, GREEDY, COUNT), folder, **layout)
    answers = [answer.ids for answer in ranks[0]]
    assert answers == run_ranks(_theirs, 1, folder)[0] and answers != greedy


WINDOW = 5


def test_a_window_as_transformers_generates(tmp_path: Path, greedy: list[list[int]]) -> None:
    """Mistral's window; the cache holds it and no more, the prompts being shorter and longer than it."""
    folder = make_folder(tmp_path / "hf", sliding_window=WINDOW)
    answers = [answer.ids for answer in write(folder, tp=2)]
    assert answers == run_ranks(_theirs, 1, folder)[0] and answers != greedy

    def several_at_a_time(made: Generator) -> tuple[int, float]:
        """(slots, largest difference) of three tokens at once, twice from the same positions, to whole sequences."""
        lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
        cache, most = made.cache(len(PROMPTS), 40, at_once=3), int(lengths.max())
        prompts = torch.tensor([prompt + [0] * (most - len(prompt)) for prompt in PROMPTS])
        made.logits(prompts, cache.at(torch.zeros_like(lengths), most, lengths - 1))
        worst = 0.0
        for first in (50, 60):
            more = torch.arange(first, first + 3).expand(len(PROMPTS), 3)
            logits = made.logits(more, cache.at(lengths, 3))
            for row, prompt in enumerate(PROMPTS):
                alone = made.llama(torch.tensor([[*prompt, *more[row].tolist()]]))[-3:, 0]
                worst = max(worst, (logits[:, row] - alone).abs().max().item())
        return cache.layers[0]._keys.shape[2], worst

    with torch.no_grad():
        slots, worst = with_generator(several_at_a_time, folder)[0]
    assert slots == WINDOW + 2 and worst < 1e-4


@pytest.mark.parametrize(("tp", "sampling"), [(2, GREEDY), (2, DRAWN), (4, GREEDY)], ids=["tp2", "tp2 drawn", "tp4"])
def test_several_ranks_as_one(
    folder: Path, greedy: list[list[int]], drawn: list[Answer], tp: int, sampling: Sampling
) -> None:
    answers = write(folder, sampling=sampling, tp=tp)
    assert [answer.ids for answer in answers] == ([answer.ids for answer in drawn] if sampling == DRAWN else greedy)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_p=0.5)], ids=["greedy", "drawn"])
def test_equally_likely_ids_on_several_ranks(folder: Path, sampling: Sampling) -> None:
    """The lowest ids are taken, or are in the nucleus."""

    def without_preference(made: Generator) -> list[list[int]]:
        made.llama.lm_head.weight.zero_()
        return [answer.ids for answer in made.generate(PROMPTS, sampling, 12)]

    alone = with_generator(without_preference, folder)[0]
    assert with_generator(without_preference, folder, tp=2) == [alone, alone]
    assert {number == 0 for row in alone for number in row} == {sampling.greedy}
    assert max(number for row in alone for number in row) < 150  # of 290


def test_decoding_rounds_up_the_number_of_keys(folder: Path, greedy: list[list[int]]) -> None:
    prompt = max(map(len, PROMPTS))

    def decode(made: Generator) -> tuple[list[list[int]], list[int]]:
        sizes, attend = [], F.scaled_dot_product_attention
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(device_named("cpu")), "decoding_keys_multiple", 16)
            patch.setattr(F, attend.__name__, lambda *a, **k: (sizes.append(a[1].shape[2]), attend(*a, **k))[1])
            ids = [answer.ids for answer in made.generate(PROMPTS, GREEDY, COUNT)]
        return ids, sizes

    ids, sizes = with_generator(decode, folder)[0]
    assert ids == greedy and device_named("cuda").decoding_keys_multiple == 128
    assert sorted({*sizes} - {prompt}) == [*range(-(-prompt // 16) * 16, prompt + COUNT, 16), prompt + COUNT]


def test_a_row_does_not_depend_on_its_neighbours(folder: Path, drawn: list[Answer]) -> None:
    for row, prompt in enumerate(PROMPTS):
        # A row's seed depends on its position, so a single prompt needs another seed.
        assert write(folder, [prompt], replace(DRAWN, seed=DRAWN.seed + row)) == [drawn[row]]


def test_a_seed_is_an_answer(folder: Path, drawn: list[Answer]) -> None:
    assert write(folder, sampling=DRAWN) == drawn
    assert write(folder, sampling=replace(DRAWN, seed=5)) != drawn
    twins = write(folder, [PROMPTS[0], PROMPTS[0]], DRAWN)
    assert twins[0] != twins[1]


def test_the_end(folder: Path, greedy: list[list[int]]) -> None:
    stop = frozenset({greedy[0][10], greedy[2][3]})
    answers = write(folder, stop=stop)
    for answer, whole in zip(answers, greedy, strict=True):
        at = next((i for i, number in enumerate(whole) if number in stop), None)
        assert answer == Answer(whole[:at], "length" if at is None else "stop")
    assert {answer.ended for answer in answers} >= {"stop"}
    assert len(answers[2].ids) <= 3


def test_the_models_last_position_ends_an_answer(folder: Path, greedy: list[list[int]]) -> None:
    answers = write(folder, [PROMPTS[0], [3] * 120], count=20)
    assert answers[0] == Answer(greedy[0][:20], "length")
    assert answers[1].ended == "context" and len(answers[1].ids) == 8


def test_tokens_are_reported_as_they_come(folder: Path, greedy: list[list[int]]) -> None:
    def events(made: Generator) -> list[tuple[int, int | None]]:
        events: list[tuple[int, int | None]] = []
        made.generate(PROMPTS[:2], GREEDY, 3, lambda row, number: events.append((row, number)))
        return events

    a, b = greedy[0], greedy[1]
    assert with_generator(events, folder)[0] == [
        *[(0, a[0]), (1, b[0]), (0, a[1]), (1, b[1]), (0, a[2]), (0, None), (1, b[2]), (1, None)]
    ]


def test_the_model_is_plain_outside_of_a_cache(folder: Path) -> None:
    def restored(made: Generator) -> list[bool]:
        attentions = [block.self_attn for block in made.llama.layers.values()]
        before = [attention.attend for attention in attentions]
        cache = made.cache(1, 8)
        with pytest.raises(ZeroDivisionError), cache.attached(made.llama):
            assert all(attention.attend not in before for attention in attentions)
            _ = 1 / 0
        made.generate(PROMPTS[:1], GREEDY, 2)
        return [attention.attend in before for attention in attentions]

    assert all(with_generator(restored, folder)[0])


LONG = [[*range(5, 95)], [7], *PROMPTS]
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "window": {"sliding_window": 5},
    "dynamic": {
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    },
}


@pytest.fixture(scope="module", params=SCALINGS)
def scaled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "hf", **SCALINGS[request.param])


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}], ids=["cp2", "cp4", "cp2 tp2"])
def test_divided_prompts_are_continued_as_whole_ones(scaled: Path, layout: dict[str, int], sampling: Sampling) -> None:
    alone = write(scaled, LONG, sampling)
    assert len({number for answer in alone for number in answer.ids}) > 30, "else the comparison would show nothing"
    assert write(scaled, LONG, sampling, **layout) == alone


def test_a_rank_keeps_its_part_of_a_prompt(scaled: Path) -> None:
    def shapes(made: Generator) -> list[torch.Size]:
        """Sizes of the keys after a prompt of 90 tokens, for 10 more."""
        cache = made.cache(1, 100)
        made.logits(torch.tensor(LONG[:1]), cache.at(torch.tensor([0]), 90, torch.tensor([89])))
        return [layer._keys.shape for layer in cache.layers]

    for rank in with_generator(shapes, scaled, cp=4):
        assert {shape[2] for shape in rank} == {96 // 4 + 10 // 4 + 2}


def test_scores_of_labels_after_divided_prompts(scaled: Path) -> None:
    labels = [[7, 8, 9], [7, 10], [11]]
    records = [EncodedRecord(prompt, labels, {}) for prompt in LONG]
    alone = with_generator(lambda made: label_scores(made, records), scaled)[0]
    for scores in with_generator(lambda made: label_scores(made, records), scaled, cp=2):
        torch.testing.assert_close(scores, alone, rtol=1e-5, atol=1e-5)
