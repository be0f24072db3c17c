"""Chat templates: text from messages, and which of its characters are trained.

A template is Jinja code of whoever made the tokenizer. It runs in the immutable sandbox, as in transformers: it reads
no file, changes no message, and ends in time.
"""

import contextlib
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from components.config import ConfigError, here_or_in_repository
from components.config.files import read_json, read_regular
from components.config.tables import OF_TOKENIZER, Chat
from components.data.special_tokens import CHAT_TEMPLATE, SETTINGS
from components.data.tokenizer import find_tokenizer

_MAPS = ("special_tokens_map.json", SETTINGS)
_MOST_SECONDS = 10.0
"""Time for the renderings of a chat, which take milliseconds; nested loops of a template could take days."""
_MOST_BYTES = 2 << 30
"""Memory for them; a template could write a text of any length."""


_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""Errors of Python that a template can raise."""


class BadChat(Exception):
    """A chat that cannot be trained under the job's settings; the message is the reason."""


class Rendered(NamedTuple):
    """One sequence of a chat."""

    text: str
    trained: list[tuple[int, int]]
    """Start and end of each part of the text that is trained: a turn, up to and with the token that ends it."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raises BadChat after _MOST_SECONDS, and MemoryError where this process would take more than _MOST_BYTES more.

    Only the main thread renders, because signals reach no other thread.
    """

    def late(*_: object) -> None:
        raise BadChat(f"the template has not ended within {_MOST_SECONDS:.0f} seconds")

    before, (soft, hard) = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    try:
        signal.setitimer(signal.ITIMER_REAL, _MOST_SECONDS)
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_bytes().split()[0])
            limits = [pages * resource.getpagesize() + _MOST_BYTES, soft, hard]
            most = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Template:
    """A template with the variables that it is given beside the messages."""

    source: str
    """The Jinja code."""
    name: str
    """Where it comes from."""
    variables: dict[str, Any]

    @functools.cached_property
    def _compiled(self) -> Any:
        return _environment().from_string(self.source)

    def render(self, messages: Sequence[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        """The text of messages. prompt: with the beginning of the turn that generation would continue.

        Raises BadChat with the template's own message.
        """
        import jinja2

        given = self.variables | {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        try:
            return self._compiled.render(**given)
        except (jinja2.TemplateError, *_ERRORS) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadChat(f"the template {self.name} cannot show it: {reason}") from None

    def fingerprint(self) -> str:
        """Everything that the text depends on: also the day, if the template asks for it."""
        today = str(datetime.now().date()) if "strftime_now" in self.source else ""
        return json.dumps([self.source, self.variables, today], sort_keys=True)


def load_template(chat: Chat, tokenizer_path: str) -> Template:
    """The template of a job. Raises ConfigError if there is none, or if it is no Jinja template."""
    import jinja2

    tokenizer = find_tokenizer(tokenizer_path)
    names: dict[str, Any] = {}
    for name in _MAPS:
        if (file := tokenizer.with_name(name)).is_file():
            content = read_json(file)
            named = {key: value for key, value in content.items() if key.endswith("_token")}
            names |= {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    if chat.template == OF_TOKENIZER:
        name, source = f"of {tokenizer.parent}", _of_folder(tokenizer)
    else:
        file = here_or_in_repository(chat.template)
        try:
            name, source = str(file), read_regular(file).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat.template: {file}: cannot be read: {error}") from None
    template = Template(source, name, names | json.loads(chat.template_kwargs))
    try:
        with bounded():
            template._compiled  # noqa: B018 - compiled once, here
    except (jinja2.TemplateError, BadChat, *_ERRORS) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"chat.template: {name}: not a Jinja template: {reason}") from None
    return template


def _of_folder(tokenizer: Path) -> str:
    if (file := tokenizer.with_name(CHAT_TEMPLATE)).is_file():
        return read_regular(file).decode()
    settings = tokenizer.with_name(SETTINGS)
    found = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            f"chat.template: {tokenizer.parent} has no chat_template.jinja, and no chat_template in {SETTINGS}: give a "
            ".jinja file; assets/templates has some"
        )
    return found


@functools.cache
def _environment() -> Any:
    """Jinja as transformers sets it up for chat templates."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Some libraries train what {% generation %} marks; here the prefix rule decides, so the tag is left out."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    # optimized would compute constants while it compiles, and hide the errors of limits.
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "optimized": False}
    made = ImmutableSandboxedEnvironment(**options, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


@bounded()
def targets(
    template: Template,
    messages: Sequence[dict[str, Any]],
    tools: Any,
    is_trained: Callable[[int], bool],
    ends: re.Pattern[str],
) -> list[Rendered]:
    """The sequences of a chat, and what of each is trained.

    The prefix rule: for each trained turn the prompt p shows the messages before it and the beginning of its turn, as
    in generation, and q shows the turn too. If q begins with p, the turn is the rest of q. If the next p begins with
    this q, the sequence goes on. Otherwise a new sequence begins, for example if p leaves out earlier thinking.

    Turns of other roles are trained with their headers, because only the assistant's turn has a generation prompt.

    ends: the special tokens. A turn ends with its last special token; what the template writes after this token, such
    as a line feed, belongs to the next turn. Raises BadChat if the template breaks the rule.
    """
    found: list[Rendered] = []
    for number in range(len(messages)):
        if not is_trained(number):
            continue
        role = messages[number]["role"]
        prompt = template.render(messages[:number], tools, prompt=role == "assistant")
        shown = template.render(messages[: number + 1], tools)
        if not shown.startswith(prompt):
            raise BadChat(
                f"the template {template.name} shows the {role}'s turn {number + 1} in another way than generation "
                "would begin it; a variable in chat.template_kwargs, or another template, may help"
            )
        *_, last = None, *ends.finditer(shown, len(prompt))
        if last is None or shown[last.end() :].strip():
            raise BadChat(f"the template {template.name} ends the {role}'s turn {number + 1} with no special token")
        span = len(prompt), last.end()
        if found and prompt.startswith(found[-1].text):
            found[-1] = Rendered(shown, [*found[-1].trained, span])
        else:
            found.append(Rendered(shown, [span]))
    return found
