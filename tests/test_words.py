"""Counts faults of sentences in docstrings, comments and pages: python -m tests.test_words [FILE ...] lists them.

A sentence begins with its subject, not with "Of" or "What", and has at most 35 words; a page answers one question.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 35
"""Words of a sentence."""
LONGEST = {"README.md": 700}
"""Words of a page, without code; of the others 1,200."""
WRITTEN = {"docs/composition.md", "docs/refusals.md", "docs/reliability.md"}
"""Pages that a program writes: tables to look something up in."""
FOLDERS = ("components", "models", "parallelize")
BEGINS_BADLY = re.compile(r"(Of|What|So many|By(?! default)|To whom|From whom|With what|Out of)\b(?! course)")
"""Words that put off the subject of a sentence. A docstring that begins with "By" or "What" describes no thing."""


def texts_of_module(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text): docstrings, those of attributes too, and runs of whole-line comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or "noqa" in token.string or token.string.startswith("#!"):
            continue
        (line, column), text = token.start, token.string.lstrip("# ")
        own = not token.line[:column].strip()
        if block and not (own and line == last + 1):
            yield first, " ".join(block)
            block = []
        first, last = (line if not block else first), line
        block.append(text)
    if block:
        yield first, " ".join(block)


def texts_of_page(page: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text): paragraphs, items of lists and cells of tables; no code, no headings."""
    block: list[str] = []
    first, fenced = 0, False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        fenced ^= line.startswith("```")
        stops = fenced or not line.strip() or line.startswith(("```", "#", "    ", "|", "!", "<!--", "- ", "* "))
        if block and (stops or re.match(r"\d+\. ", line)):
            yield first, " ".join(block)
            block = []
        if fenced or line.startswith(("```", "#", "    ", "!", "<!--")):
            continue
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in line.strip("|").split("|"))
        elif line.strip():
            first = number if not block else first
            block.append(re.sub(r"^([-*]|\d+\.) ", "", line.strip()))


def sentences(text: str) -> Iterator[str]:
    """Yields sentences. A blank line, an item of a list and an indented block end one too."""
    for part in re.split(r"\n\s*\n|\n\s*[-*] |\n {2,}(?=\S+ {2,})", text):
        plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", " ".join(part.split())))
        yield from (each for each in re.split(r"(?<=[.!?;])\s+(?=[A-Z\"`(\[])|(?<=:) (?=- )|; ", plain) if each)


def faults_of(text: str) -> Iterator[str]:
    """Yields what is wrong with each sentence."""
    for sentence in sentences(text):
        words = re.findall(r"[\w'’-]*[A-Za-z][\w'’-]*", sentence)
        if len(words) > MOST_WORDS:
            yield f"{len(words)} words: {sentence[:100]}"
        if BEGINS_BADLY.match(sentence):
            yield f"the subject comes late: {sentence[:100]}"


def words_of(page: str) -> int:
    """Words outside of code."""
    text = re.sub(r"```.*?```", "", re.sub(r"\]\([^)]*\)", "]", page), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    return len(re.findall(r"[\w'’.-]*[A-Za-z][\w'’.-]*", "\n".join(lines)))


def modules() -> list[Path]:
    return [ROOT / "train.py", *(path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py")))]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "recipes" / "README.md"]


def faults(path: Path) -> list[str]:
    """Every fault of a module or page, with its line."""
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    if name in WRITTEN:
        return []
    texts = texts_of_page(text) if path.suffix == ".md" else texts_of_module(text)
    found = [f"{name}:{line}: {fault}" for line, each in texts for fault in faults_of(each)]
    longest = LONGEST.get(name, 1200)
    if path.suffix == ".md" and words_of(text) > longest:
        found.append(f"{name}: {words_of(text)} words, {longest} at most")
    return found


def test_sentences_of_modules_are_short_and_begin_with_their_subject() -> None:
    assert [fault for path in modules() for fault in faults(path)] == []


def test_pages_are_short_and_so_are_their_sentences() -> None:
    assert [fault for path in pages() for fault in faults(path)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Of each row of blocks: how many there are.", "the subject comes late"),
        ("Ranks wait. What is whole on every rank is not.", "the subject comes late"),
        ("The sum " + "of numbers " * 20 + "is one.", "44 words"),
        ("A list of rows:\n\n- " + "\n- ".join(["a row of it"] * 20), ""),
        ("The block mask of `a + b`.", ""),
    ],
)
def test_a_fault_is_found(text: str, fault: str) -> None:
    found = [*faults_of(text)]
    assert len(found) == bool(fault)
    assert not fault or found[0].startswith(fault)


if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or [*modules(), *pages()]
    print(*[fault for path in chosen for fault in faults(path)], sep="\n")
