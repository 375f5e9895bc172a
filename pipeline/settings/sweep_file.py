"""The file of a sweep, TOML: its trials as overlays of the settings, and how poor ones are stopped.

goal = "BertPhase1"                  # or BertPhase2; each with its evaluation

[grid.phase1]                        # a trial for each combination
lr = [0.001, 0.01]
optimizer = ["AdamW", "Muon"]

[trials.wide.model]                  # and single trials, by name
hidden_size = 512

[halving]                            # optional
rungs = [200, 400]                   # steps of phase 1 at which the worse trials stop
keep = 0.5                           # share that continues
bring_back = ["wide"]                # trials that continue in any case
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from pipeline.settings.load import overlaid, overlay_errors
from pipeline.settings.sections import Phase

#: Settings by section, as text.
Overlay = Mapping[str, Mapping[str, str]]
GOALS = ("BertPhase1", "BertPhase2")
_KEYS = {"goal", "grid", "trials", "halving"}
_HALVING_KEYS = {"rungs", "keep", "bring_back"}
#: Sections without influence on a trial.
_WITHOUT_EFFECT = ("mnist", "nights")


@dataclass(frozen=True)
class Halving:
    """Successive halving: at each rung the worse trials stop."""

    #: Steps of phase 1, ascending.
    rungs: tuple[int, ...] = ()
    #: Share of the trials at a rung that continues, at least one.
    keep: float = 0.5
    #: Trials that continue in any case.
    bring_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class SweepFile:
    path: Path
    goal: str
    #: Overlays by the trials' names, in the order of the file: grid first.
    trials: Mapping[str, Overlay]
    halving: Halving

    @property
    def name(self) -> str:
        return self.path.stem


def read(path: Path) -> SweepFile:
    """Read and check a sweep. Raises `UserError` with one line for each error."""
    import tomllib

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a TOML file (docs/sweeps.md)") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    errors = [f"{key} is not known; allowed: {', '.join(sorted(_KEYS))}" for key in content.keys() - _KEYS]
    goal = content.get("goal", GOALS[0])
    if goal not in GOALS:
        errors.append(f"goal = {goal} is not allowed; allowed: {', '.join(GOALS)}")
    trials = _trials(content, errors)
    halving = _halving(content.get("halving", {}), trials, errors)
    errors += _errors_of(trials, halving)
    if errors:
        raise UserError("\nerror: ".join(f"{path}: {error}" for error in dict.fromkeys(errors)))
    return SweepFile(path, goal, trials, halving)


def _trials(content: dict[str, Any], errors: list[str]) -> dict[str, Overlay]:
    found: dict[str, Overlay] = {}
    grid, named = content.get("grid", {}), content.get("trials", {})
    for name, overlay in itertools.chain(_grid(grid, errors), _named(named, errors)):
        if name in found:
            errors.append(f"trial {name} appears twice; rename one")
        found[name] = overlay
    if not found and not errors:
        errors.append("there is no trial; give [grid.SECTION] with lists of values, or [trials.NAME.SECTION]")
    return found


def _grid(grid: Any, errors: list[str]) -> Iterator[tuple[str, Overlay]]:
    """A trial for each combination of values, named by those that vary: `lr=0.01,optimizer=Muon`."""
    axes = []
    for section, key, values in _settings(grid, "grid", errors):
        if isinstance(values, list) and values:
            texts = [_text(value, f"grid.{section}.{key}", errors) for value in values]
            axes.append([(section, key, text) for text in dict.fromkeys(texts)])
        else:
            errors.append(f"grid.{section}.{key} is not a list of values; write {key} = [A, B]")
    keys = [axis[0][1] for axis in axes]
    for combination in itertools.product(*axes) if axes else ():
        overlay: dict[str, dict[str, str]] = {}
        words = []
        for axis, (section, key, text) in zip(axes, combination, strict=True):
            overlay.setdefault(section, {})[key] = text
            if len(axis) > 1:
                words.append(f"{key if keys.count(key) == 1 else f'{section}.{key}'}={text}")
        yield ",".join(words) or "grid", overlay


def _named(trials: Any, errors: list[str]) -> Iterator[tuple[str, Overlay]]:
    if not isinstance(trials, dict):
        errors.append("trials is not a table; write [trials.NAME.SECTION]")
        return
    for name, table in trials.items():
        overlay: dict[str, dict[str, str]] = {}
        for section, key, value in _settings(table, f"trials.{name}", errors):
            overlay.setdefault(section, {})[key] = _text(value, f"trials.{name}.{section}.{key}", errors)
        yield name, overlay


def _settings(table: Any, where: str, errors: list[str]) -> Iterator[tuple[str, str, Any]]:
    """(section, name, value) of each setting of a table of tables."""
    for section, values in table.items() if isinstance(table, dict) else [(where, None)]:
        if not isinstance(values, dict):
            errors.append(f"{where}.{section} is not a section; write [{where}.SECTION], with settings below it")
            continue
        for key, value in values.items():
            yield section, key, value


def _text(value: Any, where: str, errors: list[str]) -> str:
    """A value as luigi.cfg writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        errors.append(f"{where}: {value} is not allowed; allowed: a string, a number, true, false")
    return str(value)


def _halving(table: Any, trials: Mapping[str, Overlay], errors: list[str]) -> Halving:
    if not isinstance(table, dict):
        errors.append("halving is not a table; write halving = {rungs = [200, 400], keep = 0.5}")
        return Halving()
    errors += [f"halving.{key} is not known; allowed: {', '.join(sorted(_HALVING_KEYS))}"
               for key in table.keys() - _HALVING_KEYS]  # fmt: skip
    rungs, keep, back = table.get("rungs", []), table.get("keep", 0.5), table.get("bring_back", [])
    whole = isinstance(rungs, list) and all(type(rung) is int and rung > 0 for rung in rungs)
    if not whole or rungs != sorted(set(rungs)) or (table and not rungs):
        errors.append(f"halving.rungs = {rungs} is not allowed; allowed: ascending steps, such as [200, 400]")
        rungs = []
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        errors.append(f"halving.keep = {keep} is not allowed; allowed: a share above 0, up to 1")
        keep = 0.5
    if not isinstance(back, list) or any(not isinstance(name, str) or name not in trials for name in back):
        errors.append(f"halving.bring_back = {back} is not allowed; allowed: a list of {', '.join(trials)}")
        back = []
    return Halving(tuple(rungs), float(keep), tuple(back))


def _errors_of(trials: Mapping[str, Overlay], halving: Halving) -> list[str]:
    """What is wrong with the trials' settings."""
    errors = []
    for name, overlay in trials.items():
        found = overlay_errors(overlay)
        found += [f"[{section}] has no influence on a trial; leave it out"
                  for section in _WITHOUT_EFFECT if section in overlay]  # fmt: skip
        if "work_dir" in overlay.get("run", {}):
            found.append("[run] work_dir is the same for all trials, which share stages there; leave it out")
        if not found:
            try:
                phase1 = overlaid(overlay).phase1
            except UserError as error:
                errors.append(f"trial {name}: {error}")
            else:
                errors += [f"trial {name}: {error}" for error in _errors_of_rungs(halving.rungs, phase1)]
        errors += found
    return errors


def _errors_of_rungs(rungs: Sequence[int], phase1: Phase) -> list[str]:
    if rungs and phase1.budget is not None:
        return [
            f"halving.rungs are steps, and how many fit into [phase1] budget = {phase1.budget} is not known yet; leave "
            f"one of the two out"
        ]
    return [
        f"halving.rungs has {rung}, and [phase1] max_steps is {phase1.max_steps}; lower it"
        for rung in rungs
        if rung >= phase1.max_steps
    ]
