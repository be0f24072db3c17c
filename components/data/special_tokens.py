"""The tokens around a document: which files of a tokenizer's folder name them, in the order of transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from components.config.files import read_json_as

AUTO, NONE = "auto", "none"
"""Values of training.dataset_separator that are no tokens."""
SETTINGS = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
"""The chat template of a tokenizer's folder."""
NAMING = (SETTINGS, "special_tokens_map.json", "config.json", "generation_config.json")
"""Files beside a tokenizer.json that name its tokens; the last two by id."""


@dataclass
class _AddedToken:
    content: str


@dataclass
class _Names:
    """The fields of tokenizer_config.json and special_tokens_map.json that are read; False stands for a missing one."""

    bos_token: str | _AddedToken | Literal[False] | None = False
    eos_token: str | _AddedToken | Literal[False] | None = False
    added_tokens_decoder: Any = None


@dataclass
class _Ids:
    """The fields of config.json and generation_config.json that are read."""

    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None


@dataclass(frozen=True)
class SpecialToken:
    """A token by its content or its id; None for no token."""

    token: str | int | None = None
    origin: str = ""
    """The file or the key that names the token."""


Kind = TypeVar("Kind")


def around_documents(file: Path, separator: str = AUTO) -> tuple[SpecialToken, SpecialToken]:
    """The tokens before and after each document, for a tokenizer.json and training.dataset_separator.

    As in transformers, special_tokens_map.json overrides tokenizer_config.json, unless the latter lists added tokens.
    If neither file mentions a token, config.json or generation_config.json names it by id. Raises ConfigError if a file
    cannot be read.
    """
    if separator == NONE:
        return SpecialToken(), SpecialToken()
    first = _named(file, "bos_token")
    if separator != AUTO:
        return first, SpecialToken(separator, "training.dataset_separator")
    return first, _named(file, "eos_token")


def in_settings(file: Path) -> tuple[SpecialToken, SpecialToken]:
    """The tokens that tokenizer_config.json alone names."""
    path = file.with_name(SETTINGS)
    names = _read(_Names, path)
    return _content(names.bos_token, path), _content(names.eos_token, path)


def _named(file: Path, name: str) -> SpecialToken:
    path, other = file.with_name(SETTINGS), file.with_name("special_tokens_map.json")
    settings = _read(_Names, path)
    found, origin = getattr(settings, name), path
    if settings.added_tokens_decoder is None and (named := getattr(_read(_Names, other), name)) is not False:
        found, origin = named, other
    if found is not False:
        return _content(found, origin)
    for path in map(file.with_name, ("config.json", "generation_config.json")):
        number = getattr(_read(_Ids, path), f"{name}_id")
        if number not in (None, []):
            return SpecialToken(number[0] if isinstance(number, list) else number, str(path))
    return SpecialToken()


def _content(token: str | _AddedToken | Literal[False] | None, path: Path) -> SpecialToken:
    return SpecialToken(token.content if isinstance(token, _AddedToken) else token or None, str(path))


def _read(kind: type[Kind], path: Path) -> Kind:
    return read_json_as(kind, path) if path.exists() else kind()
