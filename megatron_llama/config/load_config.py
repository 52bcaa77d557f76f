"""Load a typed ``Config`` from overrides such as ``model=llama7b trainer.tp=8``.

Hydra parses the overrides and composes the groups in ``conf/``. Values are then set one by one on the typed result,
because Hydra stops at the first error and this project reports all of them.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from megatron_llama.config.conf_folders import (
    EXPERIMENT,
    check_current_folder,
    groups_in,
    hidden_file,
    is_file,
    option_of_path,
    options_of,
    problem_of_path,
    search_path,
    suggest_option,
)
from megatron_llama.config.data_settings import fill_new_tokens, settle_data_settings
from megatron_llama.config.hf_config import fill_from_folders
from megatron_llama.config.limits import is_weight
from megatron_llama.config.problems import NOT_TEXT, ConfigError, Problem, duplicate_length, quote_value
from megatron_llama.config.rope import settle_context
from megatron_llama.config.settings import ALL_LINEAR, LORA_TARGETS, Config
from megatron_llama.config.settings_table import (
    FREE_DICT,
    Setting,
    sections,
    settings_by_name,
    suggest,
    unknown_setting_problem,
)
from megatron_llama.config.stored_settings import has_run, is_decided, is_known, read_settings, settings_of_groups
from megatron_llama.config.text_checks import NOT_UTF8, check_interpolations, check_kinds, check_texts
from megatron_llama.system.files import check_yaml

# Name of the dataclasses in conf/config.yaml; files in conf/ are checked against them.
SCHEMA = "settings"
# Hydra's name of a user's file. A file's own name may also be in conf/experiment/, which Hydra rejects.
USER_FILE = "file_of_the_user"
# The group that scales a recipe down, applied after it.
SCALED = "scaled"
MOST_BRACKETS = 16
"""Maximum nesting of brackets in an override: Hydra's grammar and OmegaConf recurse into each level."""
_ITEM = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?:\\.|[^][,'"\\])+""")
"""A text in quotes, or an item of a list."""
_EXAMPLE = "name=value, such as trainer.tp=2"
VALIDATION = "data.validation_prefixes"
_BRACKETS = dict.fromkeys("[{(", 1) | dict.fromkeys("]})", -1)
# Other exceptions that Hydra raises, e.g. for a file whose defaults are not a list of names.
_HYDRAS_OWN = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError)
# Hydra's groups for programs that it starts itself. A composition without them takes two thirds of the time.
_NOT_LOADED = "~hydra/env ~hydra/help ~hydra/hydra_help ~hydra/hydra_logging ~hydra/job_logging".split()
_NOT_LOADED += "~hydra/launcher ~hydra/output ~hydra/sweeper".split()
# Pairs of settings for one quantity: setting one on the command line resets the other.
INSTEAD_OF = {"trainer.steps": "trainer.epochs", "optim.warmup_steps": "optim.warmup_ratio"}
INSTEAD_OF |= {other: one for one, other in INSTEAD_OF.items()}


def load_config(overrides: Sequence[str], conf_dir: Path, *, resumes: bool = False) -> Config:
    """Load the config of command-line ``overrides`` over the files in ``conf_dir``.

    Args:
        resumes: Take the settings of the run in ``run.dir``, if it has one; the command line overrides them.

    Raises:
        ConfigError: With all problems of the overrides and files.
    """
    check_current_folder()
    problems: list[Problem] = []
    choices, values = _split_overrides(_parse(overrides, problems), conf_dir, problems)
    config = _compose(choices, conf_dir, problems)
    folder = _resumed_run(config, values) if resumes else None
    if folder is not None:
        _set_stored(config, folder, settings_of_groups(choices, conf_dir, (EXPERIMENT, SCALED)), problems)
    _set_all(config, values, problems)
    _reset_unusable_texts(config, problems)
    given = {override.key_or_group for override in values}
    assign = partial(_set, config, problems=problems)
    with suppress(InterpolationKeyError):  # _typed reports it
        settle_data_settings(config.data, given | choices.keys())
        fill_from_folders(config, given, assign, problems)
        fill_new_tokens(config, given, assign, problems)
        settle_context(config.model, given, assign)
    typed = _typed(config, problems)
    if problems or typed is None:
        raise ConfigError(problems, typed)
    return typed


def _compose(choices: dict[str, str], conf_dir: Path, problems: list[Problem]) -> DictConfig:
    """Compose the chosen files over the typed defaults. Raises ConfigError, with ``problems``, for invalid files."""
    try:
        config = _compose_groups(choices, conf_dir)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, *_HYDRAS_OWN) as error:
        raise ConfigError([*problems, _problem_in_files(error, choices)]) from error
    if wrong := check_interpolations(config) or check_kinds(config):
        raise ConfigError([*problems, *wrong])
    if config.allow_targets:
        rule = "must not be set in a file, because it permits classes to run"
        instead = "remove it from the file; if you trust the classes, write allow_targets=[...] on the command line"
        problems.append(Problem("allow_targets", list(config.allow_targets), rule, instead))
        config.allow_targets = []
    if config.hook.on_event is not None:
        rule = "must not be set in a file, because it runs a command"
        instead = "remove it from the file; if you trust the command, write hook.on_event=... on the command line"
        problems.append(Problem("hook.on_event", config.hook.on_event, rule, instead))
        config.hook.on_event = None
    return config


def _resumed_run(config: DictConfig, values: Sequence[Override]) -> Path | None:
    """Return the folder of the run that the command resumes; None if it starts a run."""
    given = {override.key_or_group: _value(override) for override in values}
    folder = given.get("run.dir", OmegaConf.to_container(config, resolve=False)["run"]["dir"])  # type: ignore
    starts = given.get("checkpoint.resume", config.checkpoint.resume) == "never"
    return Path(folder) if isinstance(folder, str) and not starts and has_run(Path(folder)) else None


def _set_stored(config: DictConfig, folder: Path, decided: set[str], problems: list[Problem]) -> None:
    """Set the stored settings of a run, except the ones that the chosen groups have ``decided``.

    Settings that this version does not have are ignored, as in checkpoints.
    """
    invalid: list[Problem] = []
    for name, value in read_settings(folder).items():
        if is_known(name) and not is_decided(name, decided):
            _set(config, name, value, invalid)
    rule, instead = "its config.yaml has this value, which is invalid: it {}", "write {} on the command line, or there"
    problems += [
        replace(problem, rule=rule.format(problem.rule), instead=instead.format(problem.instead.removeprefix("write ")))
        for problem in invalid
    ]


def _set_all(config: DictConfig, values: Sequence[Override], problems: list[Problem]) -> None:
    """Set the values of the command line. Raises ConfigError, with ``problems``, if a section or ``${...}`` is invalid.

    Settings with other invalid references get their defaults, so that all settings are checked.
    """
    for override in values:
        if override.is_delete():
            _delete(config, override.key_or_group, problems)
        else:
            _set(config, override.key_or_group, _value(override), problems)
    if wrong := check_interpolations(config):
        raise ConfigError([*problems, *wrong])
    problems += (wrong := check_kinds(config))
    if any(problem.field not in settings_by_name() for problem in wrong):
        raise ConfigError(problems)
    for problem in wrong:
        _set(config, problem.field, settings_by_name()[problem.field].default, [])
    if OmegaConf.is_interpolation(config.hook, "on_event"):
        rule, instead = "must not refer to other settings, which a file could set", "write the command itself"
        problems.append(Problem("hook.on_event", None, rule, instead))
        config.hook.on_event = None
    given = {override.key_or_group for override in values}
    not_null = {override.key_or_group for override in values if _value(override) is not None}
    for one, other in INSTEAD_OF.items():
        # The command line overrides a group's value of the other setting; null sets nothing.
        if one in not_null and other not in given:
            _set(config, other, settings_by_name()[other].default, problems)
    if {"trainer.steps", "trainer.epochs"} <= given and config.trainer.epochs is not None:
        # Not a rule, which cannot distinguish trainer.steps=100 (the default) from no value.
        problems.append(duplicate_length(config.trainer.epochs, config.trainer.steps))


def _reset_unusable_texts(config: DictConfig, problems: list[Problem]) -> None:
    """Add the problems of texts that no terminal and no file system takes; give these settings their defaults."""
    for problem in check_texts(cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))):
        problems.append(problem)
        setting = settings_by_name().get(problem.field)
        if setting is not None:
            _set(config, problem.field, setting.default, [])
        elif problem.field.startswith(f"{FREE_DICT}."):
            config.optim.schedule = {}


def _split_overrides(
    overrides: Iterable[Override], conf_dir: Path, problems: list[Problem]
) -> tuple[dict[str, str], list[Override]]:
    """Separate overrides that choose a file of a group, as {group: file}, from overrides that set a value."""
    groups = groups_in(conf_dir) | {EXPERIMENT}
    choices: dict[str, str] = {}
    values = []
    for override in overrides:
        group, choice = override.key_or_group, _value(override)
        if group not in groups or isinstance(choice, dict):
            values.append(override)
            continue
        if isinstance(choice, (int, float)):  # a name such as 2026_11_27
            choice = str(override.input_line).partition("=")[2]
        options = options_of(group, conf_dir)
        option = option_of_path(group, str(choice), conf_dir)
        if not override.is_delete() and (option in options or is_file(group, option)):
            choices[group] = option  # the last choice of a group wins
            if option in options and (hidden := hidden_file(group, option, conf_dir)):
                problems.append(hidden)
            continue
        if problem := problem_of_path(group, str(choice), conf_dir):
            problems.append(problem)
            continue
        rule = f"there is no {group} of that name in {conf_dir.name}/{group}/"
        problems.append(Problem(group, choice, rule, suggest_option(group, str(choice), options)))
    return choices, values


def from_yaml(text: str) -> Config:
    """Return the config that ``stored_settings.to_yaml`` wrote."""
    problems: list[Problem] = []
    config = OmegaConf.structured(Config)
    for name, value in (yaml.safe_load(text) or {}).items():
        _set(config, name, value, problems)
    typed = _typed(config, problems)
    if problems or typed is None:
        raise ConfigError(problems)
    return typed


def _parse(overrides: Sequence[str], problems: list[Problem]) -> Iterator[Override]:
    """Parse the overrides with Hydra's grammar. Invalid ones and sweeps become problems."""
    parser = OverridesParser.create()
    for text in _join_split_values(overrides, problems):
        if max(itertools.accumulate(_BRACKETS.get(letter, 0) for letter in text), default=0) > MOST_BRACKETS:
            rule, instead = f"has more than {MOST_BRACKETS} nested brackets", "write a simpler value"
            problems.append(Problem("override", f"{text[:40]} ...", rule, instead))
            continue
        try:
            override = parser.parse_override(_quote_numbers(text))
        except HydraException:
            override = None
        except ValueError:  # Python limits the digits of a number
            rule, instead = "has a number of too many digits", "write a smaller number"
            problems.append(Problem(text.partition("=")[0], f"{text.partition('=')[2][:40]} ...", rule, instead))
            continue
        if override is None or not override.key_or_group:
            problems.append(_syntax_problem(text))
        elif override.is_sweep_override():
            problems.append(_sweep_problem(override.key_or_group, text.partition("=")[2]))
        else:
            yield override


def _quote_numbers(text: str) -> str:
    """Quote the numbers and booleans in an override of a text setting, so that Hydra keeps them as typed.

    In data.prefixes, only items with an underscore, such as the path 2024_01: the others are weights.
    """
    name, equals, value = text.partition("=")
    name = name.lstrip("+")
    setting = settings_by_name().get(name)
    is_text = name == VALIDATION or (setting is not None and str in (setting.kind, setting.item_kind))
    if not is_text and name != "data.prefixes":
        return text

    def quote(item: re.Match[str]) -> str:
        bare = item.group().strip()
        is_number = NOT_TEXT.fullmatch(bare) and bare.lower() != "null" and (is_text or "_" in bare)
        return item.group().replace(bare, f'"{bare}"') if is_number else item.group()

    return name + equals + _ITEM.sub(quote, value)


def _join_split_values(overrides: Sequence[str], problems: list[Problem]) -> Iterator[str]:
    """Yield the overrides. Lists and mappings that the shell split at their spaces become problems."""
    rest = list(overrides)
    while rest:
        text = rest.pop(0)
        depth = max(0, _open_brackets(text)) if "=" in text else 0
        depths = itertools.accumulate(map(_open_brackets, rest), initial=depth)
        count = next((count for count, depth in enumerate(depths) if depth == 0), 0)  # words up to the last bracket
        if not count:
            yield text
            continue
        whole = " ".join([text, *rest[:count]])
        del rest[:count]
        rule = "the shell split this value at its spaces"
        problems.append(Problem(whole.partition("=")[0], None, rule, f"put it in quotes: {shlex.quote(whole)}"))


def _open_brackets(text: str) -> int:
    return sum(_BRACKETS.get(letter, 0) for letter in text)


def _sweep_problem(name: str, values: str) -> Problem:
    """Return the problem of an override that is a sweep, Hydra's syntax for several runs."""
    setting = settings_by_name().get(name)
    if setting is not None and setting.kind is list:
        instead = f"write {name}={_quote_list(values)}"
    elif setting is not None and setting.kind is str:
        instead = f"put the text in quotes inside quotes: {name}={quote_value(values)}"
    else:
        first = re.split("[(,)]", values)["(" in values]
        instead = f"write one value, {name}={first}, or add -m, which starts a run for each value"
    return Problem(name, values, "is a sweep; a run has one value for each setting", instead)


def _syntax_problem(text: str) -> Problem:
    """Return the problem of text that Hydra's grammar rejects."""
    rule = "must have the form name=value"
    name, equals, value = text.partition("=")
    if re.search(r"[\ud800-\udfff]", text):  # how Python represents bytes that it cannot decode
        rule, instead = NOT_UTF8
    elif text.startswith("-"):
        known = name.lstrip("-") in settings_by_name()
        instead = f"write {text.lstrip('-')}" if known and equals else f"write {_EXAMPLE}; --help lists the options"
    elif equals and value.startswith(("[", "{")) and not value.endswith(("]", "}")) and _open_brackets(value) > 0:
        rule, instead = "has an open bracket", f"close it; a list with spaces needs quotes: '{name}=[1, 2]'"
    elif value.startswith("="):
        instead = f"write {name}={value.lstrip('=')}"
    elif equals and re.match(r"[\['\"]*~/", value):  # quoted, it would name a folder ~ in the current folder
        instead = f"write $HOME, because the shell keeps this ~: {name}={value.replace('~/', '$HOME/')}"
    elif re.search("^,|,,|,$", value) and getattr(settings_by_name().get(name), "kind", None) in (int, float):
        instead = f"write a value on both sides of each comma: {name}={','.join(filter(None, value.split(',')))}"
    elif name and value:
        quoted = {"[]": _quote_list(value[1:-1]), "{}": shlex.quote(re.sub(r"(?<!\\)[()=]", r"\\\g<0>", value))}
        instead = f"quote or escape the value: {name}={quoted.get(value[0] + value[-1]) or quote_value(value)}"
    else:
        instead = f"write {_EXAMPLE}; quote a value with spaces: 'run.dir=my run'"
    return Problem("override", text, rule, instead)


def _quote_list(items: str) -> str:
    """Return a list for the shell and Hydra's grammar, from items with commas between them."""
    return quote_value([float(item) if is_weight(item) else item for item in map(str.strip, items.split(","))])


def _value(override: Override) -> Any:
    """Return the override's value in plain Python; None for a deletion."""
    return None if override.is_delete() else override.value()


def _compose_groups(choices: dict[str, str], conf_dir: Path) -> DictConfig:
    """Compose the chosen groups over the typed defaults with Hydra."""
    if f"{SCHEMA}.yaml" not in ConfigStore.instance().repo:  # once: storing takes a fifth of a composition's time
        ConfigStore.instance().store(SCHEMA, Config)
    defaults = yaml.safe_load((conf_dir / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    by_default = {name.removeprefix("optional ") for entry in defaults if isinstance(entry, dict) for name in entry}
    if is_file(EXPERIMENT, choices.get(EXPERIMENT, "")):
        # Hydra gets a user's file as if it were in conf/experiment/.
        path = Path(choices[EXPERIMENT])
        try:
            check_yaml(path)
            node = OmegaConf.load(path)
        except (ValueError, OSError) as error:
            raise OmegaConfBaseException(f"In '{path}': {error}") from error
        if not isinstance(node, DictConfig):
            raise OmegaConfBaseException(f"In '{path}': contains no settings")
        ConfigStore.instance().store(group=EXPERIMENT, name=USER_FILE, node=node, package="_global_")
        choices = {**choices, EXPERIMENT: USER_FILE}
    # Hydra requires a plus before a group without a default; users may omit it.
    in_order = sorted(choices.items(), key=lambda chosen: chosen[0] == SCALED)
    overrides = [f"{'' if group in by_default else '+'}{group}={choice}" for group, choice in in_order]
    with initialize_config_dir(str(conf_dir.resolve()), version_base="1.3"):
        return hydra_compose("config", overrides=[*overrides, *search_path(conf_dir), *_NOT_LOADED])


def _problem_in_files(error: BaseException, choices: Mapping[str, str]) -> Problem:
    """Return the problem of an error that Hydra, OmegaConf or PyYAML raised on a file in conf/ or a user's file."""
    user_file = choices.get(EXPERIMENT, "")
    files = {f"{EXPERIMENT}/{USER_FILE}": user_file} if is_file(EXPERIMENT, user_file) else {}
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        where = f"{mark.name}, line {mark.line + 1}"
        return Problem("conf", None, f"{where} is not valid YAML: {error.problem}", "correct that line")
    cause: BaseException | None = error
    while cause is not None and not getattr(cause, "full_key", None):
        cause = cause.__cause__ or cause.__context__
    name = str(getattr(cause, "full_key", "")) or "conf"
    named = re.match(r"In '([^']+)'", str(error))
    where = user_file if files else "a file in conf/"  # files in conf/ are tested
    if named:
        where = named[1] if named[1].endswith((".yaml", ".yml")) else f"conf/{named[1]}.yaml"
        where = files.get(named[1], where)
    if isinstance(error, RecursionError):
        return Problem("conf", None, f"the defaults of {where} lead back to it", "correct the defaults of that file")
    reason = str(cause or error) or str(error) or "it has a value that no setting takes"
    rule = f"{where} is invalid: {reason.splitlines()[0]}"
    setting = settings_by_name().get(name)
    guess = f"write {suggest(name)}" if setting is None and suggest(name) else "correct that file"
    return Problem(name, None, rule, f"write {setting.type_name}" if setting else guess)


def _set(config: DictConfig, name: str, value: Any, problems: list[Problem]) -> None:
    """Set one value, or each value of a section that is given as a mapping."""
    setting = settings_by_name().get(name)
    if name == FREE_DICT and isinstance(value, dict):
        with open_dict(config):
            config.optim.schedule = value
    elif name.startswith(FREE_DICT + "."):
        # Any key is valid: the keys are arguments of the schedule's class.
        OmegaConf.update(config, name, value, force_add=True)
    elif isinstance(value, dict) and name in sections():
        for key, item in value.items():
            _set(config, f"{name}.{key}", item, problems)
    elif name in sections() and not (value is None and sections()[name].optional):
        example = next(setting for setting in settings_by_name() if setting.startswith(name + "."))
        instead = f"write one of its settings, such as {example}=..."
        problems.append(Problem(name, value, "is a section of settings, not a setting", instead))
    elif setting is None and name not in sections():
        problems.append(unknown_setting_problem(name, value))
    else:
        _assign(config, name, setting, value, problems)


def _assign(config: DictConfig, name: str, setting: Setting | None, value: Any, problems: list[Problem]) -> None:
    """Set one known setting, or report that the value has the wrong type."""
    parent_name, _, key = name.rpartition(".")
    parent = OmegaConf.select(config, parent_name) if parent_name else config
    if parent is None:
        # An optional section that is null: its other values start from their defaults.
        outer, _, inner = parent_name.rpartition(".")
        OmegaConf.select(config, outer)[inner] = sections()[parent_name].kind()
        parent = OmegaConf.select(config, parent_name)
    try:
        if setting is not None and setting.kind is bool and isinstance(value, int) and value not in (0, 1):
            raise OmegaConfBaseException  # OmegaConf accepts any number as true
        if name == "finetune.lora_target_modules" and value == ALL_LINEAR:  # PEFT writes it without brackets
            value = [value]
        elif name == VALIDATION and isinstance(value, dict):
            value = [{each: paths} for each, paths in value.items()]
        parent[key] = value
    except OmegaConfBaseException:
        assert setting is not None, "null is a legal value of an optional section"
        problem = setting.problem(value) if setting.kind is dict and isinstance(value, dict) else None
        problems.append(problem or Problem(name, value, f"must be {setting.type_name}", setting.suggest_value(value)))


def _delete(config: DictConfig, name: str, problems: list[Problem]) -> None:
    """Remove one of the schedule's arguments; no other setting can be removed."""
    argument = name.removeprefix(FREE_DICT + ".")
    if name.startswith(FREE_DICT + ".") and argument in config.optim.schedule:
        with open_dict(config):
            schedule = cast("dict[str, Any]", OmegaConf.to_container(config.optim.schedule, resolve=False))
            config.optim.schedule = {key: item for key, item in schedule.items() if key != argument}
        return
    setting = settings_by_name().get(name)
    instead = f"write {name}=null" if setting is not None and setting.optional else f"omit ~{name}"
    problems.append(Problem(f"~{name}", None, "only arguments of optim.schedule can be removed", instead))


def _typed(config: DictConfig, problems: list[Problem]) -> Config | None:
    """Return the config as dataclasses; None, with a problem added, if a value is missing.

    Interpolations in the schedule remain; ``resolve`` resolves them.
    """

    def unresolved(error: OmegaConfBaseException, owner: str) -> Problem:
        rule = f"cannot be resolved: {str(error).splitlines()[0]}"
        name = str(getattr(error, "full_key", "") or owner)
        return Problem(name, None, rule, "write a value, or ${...} with the name of a setting")

    schedule = cast("dict[str, Any]", OmegaConf.to_container(config.optim.schedule, resolve=False))
    try:
        OmegaConf.to_container(config.optim.schedule, resolve=True)  # checks that every name exists
    except OmegaConfBaseException as error:
        problems.append(unresolved(error, "optim.schedule"))
        schedule = {}
    with open_dict(config):
        config.optim.schedule = {}
    try:
        typed = cast(Config, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        problems.append(unresolved(error, "config"))
        return None
    typed.optim.schedule = schedule
    if typed.finetune.lora_target_modules == [ALL_LINEAR]:
        typed.finetune.lora_target_modules = list(LORA_TARGETS)
    return typed
