"""Chats from a book of assets/kjv. The user begins a verse, and the assistant ends it; a chat has 1 to 3 verses.

python assets/chats/from_verses.py assets/kjv/19-psalms.txt > assets/chats/psalms.jsonl
"""

import json
import re
import sys
from pathlib import Path


def main(book: Path) -> None:
    """Print one chat per line, made of the verses that have a pause."""
    verses = [line for line in book.read_text(encoding="utf-8").splitlines() if re.search(r"[:;] ", line)]
    number = at = 0
    while at < len(verses):
        messages = []
        for verse in verses[at : at + 1 + number % 3]:
            begun, pause, rest = re.split(r"([:;]) ", verse, maxsplit=1)
            messages += [{"role": "user", "content": begun + pause}, {"role": "assistant", "content": rest}]
        print(json.dumps({"messages": messages}, ensure_ascii=False))
        number, at = number + 1, at + 1 + number % 3


if __name__ == "__main__":
    main(Path(sys.argv[1]))
