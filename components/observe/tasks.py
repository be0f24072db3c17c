"""lm-eval's tasks, of which a model scores the likelihoods of texts. Needs lm-eval, so only rank 0 imports this module.

Texts become tokens as in lm-eval's `hf` model with add_bos_token=True and max_length=training.seq_len.
"""

import contextlib
import difflib
import io
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from components.config import ConfigError
from components.data.tokenizer import Tokenizer, load_tokenizer
from components.launch.exit_codes import ExitCode

_SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
"""Output types of lm-eval that likelihoods answer."""
_CHECKED = 16
"""Documents of each task that are read before a run starts."""
_FEW_SHOT_SEED = 1234
"""lm-eval's own, which chooses the examples before a question."""
Request = tuple[str, tuple[Any, ...]]
"""(loglikelihood or loglikelihood_rolling, (context, continuation) or (text,))."""


class Window(NamedTuple):
    """Tokens, of which the last are scored after the others."""

    tokens: list[int]
    scored: int


class Answers(TemplateLM):
    """Stands for the model in lm-eval: first it turns requests into windows, then it gives their known scores."""

    def __init__(self, tokenizer: Tokenizer, room: int) -> None:
        """room: the most tokens that the model takes."""
        super().__init__()
        self._tokens, self._room = tokenizer, room
        before = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if before is None:
            raise ConfigError("evaluation.tasks: the tokenizer names no token that begins or ends a text")
        self._before: int = before
        self._begins = tokenizer.decode([before])
        self.windows: dict[Request, list[Window]] = {}
        """Windows of each request, in the order of the requests."""
        self.known: dict[Request, tuple[float, bool]] | None = None
        """Log-likelihood of each request, and whether each of its tokens was the likeliest one."""

    @property
    def eot_token_id(self) -> int:
        return self._before

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self._tokens.encode_template(string)
        begun = add_special_tokens is None and string.startswith(self._begins)
        has_first = self._tokens.bos_id is not None and add_special_tokens is not False and not begun
        return [self._before, *ids] if has_first else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        if self.known is None:
            return super().loglikelihood(requests, disable_tqdm=True)
        return [self.known["loglikelihood", request.args] for request in requests]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        for args, context, continuation in requests:
            self.windows["loglikelihood", args] = [self._window(context, continuation)]
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        if self.known is not None:
            return [self.known["loglikelihood_rolling", request.args][0] for request in requests]
        for request in requests:
            ids = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(ids, self._before, max_seq_len=self._room, context_len=1)
            windows = [self._window(*make_disjoint_window(each)) for each in found]
            self.windows["loglikelihood_rolling", request.args] = windows
        return [0.0] * len(requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        raise NotImplementedError

    def _window(self, context: list[int], continuation: list[int]) -> Window:
        """The last tokens that the model takes. Raises ValueError if a continuation is empty or does not fit."""
        if not 1 <= len(continuation) <= self._room:
            count, room = len(continuation), self._room
            raise ValueError(f"an answer has {count} tokens; training.seq_len = {room} takes from 1 to {room}")
        return Window([*context, *continuation][-self._room - 1 :], len(continuation))


class Tasks:
    """The tasks of a job with their requests, which are built once."""

    def __init__(self, names: Sequence[str], limit: int | None, tokenizer: Tokenizer, room: int) -> None:
        """Raises ConfigError for tasks that cannot be used."""
        self._model, self._limit, self._loaded = Answers(tokenizer, room), limit, load_tasks(names)
        for name, task in self._loaded["tasks"].items():
            with _told(name), _silent():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=_FEW_SHOT_SEED)
                task.build_all_requests(limit=limit, rank=0, world_size=1)
                for instance in task.instances:
                    getattr(self._model, instance.request_type)([instance])
            # evaluate() would build them again each time.
            task.build_all_requests = lambda **_: None

    @property
    def windows(self) -> list[Window]:
        return [window for windows in self._model.windows.values() for window in windows]

    def describe(self) -> str:
        names = ", ".join(f"{name} ({task.OUTPUT_TYPE})" for name, task in self._loaded["tasks"].items())
        tokens = sum(len(window.tokens) for window in self.windows)
        return f"evaluation: {names}: {len(self.windows):,} texts, {tokens:,} tokens"

    def numbers(self, found: Sequence[tuple[float, bool]]) -> dict[str, dict[str, Any]]:
        """Metrics of each task and group, from each window's log-likelihood, and whether all its tokens were likeliest.

        lm-eval computes them. A metric of a filter is named metric,filter. Adds the number of documents.
        """
        left = iter(found)
        self._model.known = {}
        for request, windows in self._model.windows.items():
            own = [next(left) for _ in windows]
            self._model.known[request] = sum(each[0] for each in own), all(each[1] for each in own)
        for task in self._loaded["tasks"].values():
            for instance in task.instances:
                instance.resps, instance.filtered_resps = [], {}
        with _silent():
            results = evaluate(self._model, self._loaded, limit=self._limit, bootstrap_iters=0, log_samples=False)
        documents = {name: each["effective"] for name, each in results["n-samples"].items()}
        return {
            name: {key.removesuffix(",none"): float(value) for key, value in row.items() if _is_number(key, value)}
            | ({"documents": documents[name]} if name in documents else {})
            for name, row in results["results"].items()
        }


def load_tasks(names: Sequence[str]) -> Any:
    """lm-eval's TaskDict of names and files, with data but without requests. Raises ConfigError for all that are wrong.

    Reading the index of lm-eval's names takes 10 seconds or more; tasks that are all files do without.
    """
    if not hasattr(TaskManager, "load"):
        raise ConfigError('evaluation.tasks: this lm-eval is too old: pip install "lm-eval>=0.4.13"')
    with _silent():
        manager = TaskManager(include_defaults=not all(Path(name).is_file() for name in names))
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    mistakes = []
    for name in names:
        try:
            with _told(name), _silent():
                if not Path(name).is_file() and name not in manager.task_index:
                    near = difflib.get_close_matches(name, manager.all_tasks, 1)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    raise ValueError(f"neither a file nor a task of lm-eval{hint}")
                found = manager.load([name])
                if twice := found["tasks"].keys() & loaded["tasks"].keys():
                    raise ValueError(f"{min(twice)} is named twice")
                for task in found["tasks"].values():
                    _check(task)
            for part, own in loaded.items():
                own |= found.get(part, {})
        except ConfigError as error:
            mistakes += error.messages
    if mistakes:
        raise ConfigError(mistakes)
    return loaded


def _check(task: Any) -> None:
    """Raises ValueError for a task that likelihoods do not answer, or that has no documents."""
    if task.OUTPUT_TYPE not in _SCORED:
        raise ValueError(
            f"{task.config.task} has the type {task.OUTPUT_TYPE}, which needs generated text: evaluate it on an export "
            f"(docs/generate.md); a run takes {', '.join(_SCORED)}"
        )
    if not len(task.eval_docs):
        raise ValueError(f"{task.config.task} has no documents")


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Turns any error of lm-eval, of its data or of a task's own code into a ConfigError that names the task."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f'evaluation.tasks: "{name}": {reason}') from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the bars of progress and notes of lm-eval and datasets."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def _is_number(key: str, value: Any) -> bool:
    return key != "sample_len" and isinstance(value, int | float) and not isinstance(value, bool)


def main(argv: list[str]) -> int:
    """Check that tasks load, and that their first documents fit; prints the mistakes. argv: of check_evaluation."""
    names, limit, tokenizer, separator, room = json.loads(argv[0])
    try:
        Tasks(names, min(limit or _CHECKED, _CHECKED), load_tokenizer(tokenizer, separator), room)
    except ConfigError as error:
        print(*error.messages, sep="\n")
        return ExitCode.CONFIG
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
