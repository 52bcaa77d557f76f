"""Effect of each changed setting on a resumed run: accepted, logged, rejected, or allowed by a setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from docs import generate
from megatron_llama.checkpoint.changed_settings import Difference, check_allowed, find_differences
from megatron_llama.checkpoint.manifest import State
from megatron_llama.config import ConfigError
from megatron_llama.config.limits import ALLOWED
from megatron_llama.config.settings_table import settings_by_name
from megatron_llama.data.resume_record import make_record
from megatron_llama.plan import Plan
from tests.checkpoint.changes import CHANGES, checkpoint_of, differences_of, outcome, plan_in, write_datasets
from tests.config.helpers import as_typed
from tests.data.files import numbered, write_indexed
from tests.golden import GoldenFiles
from tests.messages import raises_with_message

ELSEWHERE = {
    **{f"data.{name}": "data.prefixes" for name in ("chat_template", "chat_template_kwargs", "template", "format")},
    "data.response_marker": "data.prefixes",
    "trainer.epochs": "trainer.steps",
}
"""Settings that the launcher and the plan turn into another one."""
KINDS = {name: setting.on_change for name, setting in settings_by_name().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The datasets a and b."""
    folder = tmp_path_factory.mktemp("datasets")
    write_datasets(folder)
    return folder


def between(before: Plan, after: Plan, step: int = 3) -> list[Difference]:
    return find_differences(after, checkpoint_of(before, step), make_record(after))


def names(changed: Sequence[Difference]) -> list[str]:
    return [difference.name for difference in changed]


def test_every_setting_has_a_change() -> None:
    assert set(CHANGES) == set(settings_by_name()), "add the new setting to changes.yaml"


@pytest.mark.parametrize("name", CHANGES)
def test_one_change(name: str, folder: Path) -> None:
    kind = KINDS[name]
    changed = differences_of(name, folder)
    where = ELSEWHERE.get(name, name)
    if name == "trainer.epochs":
        kind = "logged"
    assert outcome(changed) == (f"allow=[{kind}]" if kind in ALLOWED else kind)
    if kind == "fixed":  # with derived settings
        assert where in names(changed)
    else:
        assert names(changed) == ([] if kind == "free" else [where]), "that one difference and no other"


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind in ALLOWED])
def test_before_the_first_step_data_batch_and_optimizer_may_be_any(name: str, folder: Path) -> None:
    assert outcome(differences_of(name, folder, step=0)) == "free"


def test_the_same_run_differs_in_nothing(folder: Path) -> None:
    """A derived setting that the checkpoint lacks is no difference."""
    plan = plan_in(folder, 1, {})
    assert between(plan, plan_in(folder, 1, {})) == []
    # Not even if all derived settings are written out, as in the run's config.yaml.
    assert between(plan, Plan(**{**vars(plan), "requested": plan.config})) == []
    plan = plan_in(folder, 1, {})
    old = checkpoint_of(plan, 3)
    assert old.settings["data"].pop("eod_mask_loss") is False
    assert find_differences(plan, old, make_record(plan)) == []
    requested = plan_in(folder, 1, {"data.eod_mask_loss": True})
    assert names(find_differences(requested, old, make_record(requested))) == ["data.eod_mask_loss"]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind not in ("free", "logged")])
def test_the_suggestion_to_keep_the_saved_value_can_be_typed(name: str, folder: Path) -> None:
    changed = differences_of(name, folder)
    with pytest.raises(ConfigError) as caught:
        check_allowed(changed, [], Path("folder"))
    refused = [difference for difference in changed if difference.kind != "logged"]
    for problem, difference in zip(caught.value.problems, refused, strict=True):
        rest = ", or export the weights" if difference.kind == "fixed" else " to keep the saved value"
        words = problem.instead.removeprefix("write ").partition(rest)[0]
        null_section = (difference.name.rpartition(".")[0], None)
        assert as_typed(words) in ((difference.name, difference.saved), null_section)
        had_section = any("rope_scaling" in setting for setting in CHANGES[name].base)
        if "rope_scaling" in name and difference.saved is None and not had_section:
            assert as_typed(words) == null_section


def test_differences_of_each_situation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings derived from other settings are omitted; one message has all problems and one setting."""
    page = ""
    monkeypatch.chdir(folder)
    for line in GoldenFiles.commands("checkpoint/differences.txt"):
        name, *plans = line.split(" | ")
        changed = between(*(plan_in(Path(), 1, json.loads(settings)) for settings in plans))
        page += f"$ {line}\n{outcome(changed)}\n" + "".join(f"{each.kind} {each}\n" for each in changed)
        for allow in (["batch"], ["data"], ["optim"], ["data", "optim"], ALLOWED):
            try:
                check_allowed(changed, allow, Path("runs/one/step_00000003"))
                page += f"allowed by {allow}\n"
            except ConfigError as error:
                page += f"{error}\n" if allow == ["batch"] or "fixed" in name and allow == ALLOWED else ""
    GoldenFiles.check("checkpoint/differences.txt", page)


def test_a_moved_dataset_is_the_same_and_a_replaced_one_is_not(folder: Path, tmp_path: Path) -> None:
    before = checkpoint_of(plan_in(folder, 1, {}))
    for name in ("a", "b"):
        for path in folder.glob(f"{name}[._]*"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    moved = plan_in(tmp_path, 1, {})
    changed = find_differences(moved, before, make_record(moved))
    assert outcome(changed) == "logged" and len(changed) == 2
    write_indexed(tmp_path / "a", numbered(30))
    replaced = plan_in(tmp_path, 1, {})
    assert outcome(find_differences(replaced, before, make_record(replaced))) == "allow=[data]"


def old_checkpoint(plan: Plan) -> State:
    """A checkpoint of a version that had fewer settings."""
    state = checkpoint_of(plan)
    state.consumed_tokens = state.lr = None
    settings = state.settings
    del settings["trainer"]["batch_schedule"], settings["checkpoint"]["allow"], settings["data"]["schedule"]
    return state


@pytest.mark.parametrize(
    "name", ["data.prefixes", "data.split", "data.seq_length", "trainer.seed", "trainer.global_batch_size"]
)
def test_an_old_checkpoint_is_compared_by_its_settings(name: str, folder: Path) -> None:
    plan, state = plan_in(folder, 1, {}), old_checkpoint(plan_in(folder, 1, {}))
    assert find_differences(plan, state, make_record(plan)) == []
    assert state.position.tokens == state.consumed_samples * 32
    plan = plan_in(folder, 1, {name: CHANGES[name].now})
    changed = find_differences(plan, state, make_record(plan))
    assert names(changed) == [name] and outcome(changed) == f"allow=[{KINDS[name]}]"


def test_a_checkpoint_without_a_record_of_its_data_is_refused(folder: Path) -> None:
    plan = plan_in(folder, 1, {})
    state = checkpoint_of(plan)
    state.data = None
    with raises_with_message(ConfigError, "the checkpoint of step 3 has no data record.*init_from=FOLDER"):
        find_differences(plan, state, make_record(plan))


def test_the_page_is_not_stale(folder: Path) -> None:
    page = (generate.ROOT / "docs/reference/resume_settings.md").read_text(encoding="utf-8")
    assert page == generate.RESUME_INTRODUCTION + generate.resume_table(folder), "run: python docs/generate.py resume"
