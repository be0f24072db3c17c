"""The choice at a start, from the checkpoint folder: continue, take the initial weights, begin at step 0, or refuse.

All ranks make the same choice, by reading only. Folders are renamed later, once the weights are loaded.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from components.config import Checkpoint, ConfigError
from components.state.folder import Branch, Copy, Fault, Saved, fault, listed, names_in, saved_in, unusable
from parallelize.together import read_together

DAMAGED, ABANDONED = "corrupt-", "abandoned-"
"""Prefixes of folders that are put aside: kept, and never chosen or pruned."""


@dataclass
class Choice:
    """Where this start begins."""

    base: Saved | None = None
    """The checkpoint to continue from; without one the run starts from the initial path, or at step 0."""
    excluded: frozenset[str] = frozenset()
    """Parts that are not loaded, of the base or of the checkpoint at the initial path."""
    branch: Branch = field(default_factory=Branch)
    damaged: list[Saved] = field(default_factory=list)
    later: list[Saved] = field(default_factory=list)
    """Checkpoints of other branches, with steps after that of base."""
    said: list[str] = field(default_factory=list)


Bring = Callable[[Copy], Fault | None]
"""Called by all ranks: makes a local folder of a copy; returns why the copy cannot be used."""


def choose(
    folder: Path, config: Checkpoint, steps: int, copies: Sequence[Copy], bring: Bring | None, apart: bool
) -> Choice:
    """Choose the newest checkpoint that verifies. Called by all ranks. A newer copy in a store is brought first.

    steps: see unusable. apart: each node has only its ranks' files, so a checkpoint is whole only as a copy.

    If load_step is set, and did not begin that checkpoint's branch, choose the checkpoint of load_step instead. Raises
    ConfigError if a checkpoint cannot be read, or if load_step's is missing. Raises ConfigError, too, if there are
    checkpoints, none of them can be continued, and there is no initial_load_path.
    """
    local: list[Saved] = read_together(lambda: saved_in(folder), first_only=True)[0]
    # The sort is stable: the local folder is tried before its copy.
    there = sorted([*copies, *([] if apart else local)], key=lambda saved: saved.order)
    asked = Branch(load_step=config.load_step, exclude_from_loading=tuple(config.exclude_from_loading))
    choice = Choice(excluded=frozenset(config.exclude_from_loading), branch=asked)

    def look(saved: Saved) -> Fault | None:
        reason = unusable(saved, steps) or bring(saved) if bring and isinstance(saved, Copy) else None
        return reason or fault(saved.folder) or unusable(saved, steps)

    def continued(base: Saved) -> Choice:
        choice.damaged = [saved for saved in choice.damaged if saved.folder != base.folder]  # its copy was brought
        return _continue(choice, base, asked, [*local, *copies], apart)

    for saved in reversed(there):
        is_asked = config.load_step in (-1, saved.branch.load_step)
        if isinstance(saved, Copy) and not is_asked:
            break
        if reason := look(saved):
            _pass_over(choice, saved, reason)
        elif is_asked:
            return continued(saved)
        else:
            break
    if config.load_step != -1:
        found = next((saved for saved in reversed(there) if saved.step == config.load_step), None)
        reason = look(found) if found else None
        if found is None or reason:
            where = f"{folder}/step-{config.load_step}: {reason or 'not there'}. Steps there: {listed(there)}"
            raise ConfigError(f"checkpoint.load_step = {config.load_step}: {where}")
        return continued(found)
    if config.initial_load_path:
        if there or local:
            choice.said.append(f"no checkpoint in {folder} can be continued: checkpoint.initial_load_path is taken")
        return choice
    aside = read_together(lambda: [*_put_aside(folder)], first_only=True)[0]
    if there or local or aside:
        remedy = "set checkpoint.initial_load_path, or move the folder away to begin at step 0"
        lines = [*choice.said, *(f"{name} was put aside earlier" for name in aside)]
        raise ConfigError([*lines, f"{folder}: of the checkpoints there none can be continued: {remedy}"])
    return choice


def _pass_over(choice: Choice, saved: Saved, reason: Fault) -> None:
    choice.said.append(f"checkpoint {saved.folder} passed over: {reason}")
    if reason.damaged and not isinstance(saved, Copy):
        choice.damaged.append(saved)


def _continue(choice: Choice, base: Saved, asked: Branch, there: list[Saved], apart: bool) -> Choice:
    """Continue from base: on its branch, or on a new branch if `asked` asks for what its branch has not done yet."""
    begun, choice.base = base.branch, base
    goes_back = asked.load_step not in (-1, begun.load_step)
    done = () if goes_back else begun.exclude_from_loading
    choice.excluded = frozenset(asked.exclude_from_loading) - {*done}
    number, began_at = begun.number, begun.began_at
    later = [saved for saved in there if saved.step > base.step and saved not in choice.damaged]
    later = [saved for saved in later if not isinstance(saved, Copy)]
    if apart:  # parts of checkpoints that are whole nowhere, and never will be if a node is lost
        copied = {saved.order for saved in there if isinstance(saved, Copy)}
        choice.later = [saved for saved in there if saved.order not in copied]
    if goes_back or choice.excluded:
        number = 1 + max(saved.branch.number for saved in there)
        began_at = 0 if "train_state" in choice.excluded else base.step
        choice.later += [saved for saved in later if saved not in choice.later]
        choice.said += _said(choice, asked)
    elif asked.load_step != -1:
        choice.said.append(f"checkpoint.load_step = {asked.load_step}: this branch began there, and goes on")
    choice.branch = Branch(number, began_at, asked.load_step, asked.exclude_from_loading)
    return choice


def _said(choice: Choice, asked: Branch) -> Iterator[str]:
    assert choice.base is not None
    parts = f" without {', '.join(sorted(choice.excluded))}" if choice.excluded else ""
    aside = f"; later steps are put aside as {ABANDONED}step-N: {listed(choice.later)}" if choice.later else ""
    yield f"a new branch begins at step {choice.base.step}{parts}{aside}"


def _put_aside(folder: Path) -> Iterator[str]:
    """Names of checkpoints that were put aside."""
    yield from (name for name in names_in(folder) if re.match(rf"({DAMAGED}|{ABANDONED})step-\d", name))


def put_aside(folder: Path, name: str) -> None:
    """Give a checkpoint a name under which nothing chooses or prunes it."""
    names = (f"{name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    folder.rename(next(path for name in names if not (path := folder.with_name(name)).exists()))
