"""Pairs from assets/kjv: the prompt begins a verse of the Psalms, chosen is how the verse ends, rejected how another
book's verse of about that length ends.

python assets/pairs/from_verses.py > assets/pairs/psalms.jsonl
"""

import json
import random
import re
from pathlib import Path

BOOKS = Path(__file__).resolve().parents[1] / "kjv"
MOST = 160
"""Characters of a part of a verse."""


def halves(book: Path) -> list[tuple[str, str]]:
    """Beginning and end of each verse that has a pause."""
    verses = (re.split(r"(?<=[:;]) ", line, maxsplit=1) for line in book.read_text(encoding="utf-8").splitlines())
    return [(each[0], each[1]) for each in verses if len(each) == 2 and max(map(len, each)) <= MOST]


def main() -> None:
    """Print one pair per line."""
    draw = random.Random(0)
    others = [end for book in sorted(BOOKS.glob("0[1-9]-*.txt")) for _, end in halves(book)]
    others.sort(key=len)
    lengths = [len(end) for end in others]
    for prompt, chosen in halves(BOOKS / "19-psalms.txt")[::2]:
        near = [at for at, length in enumerate(lengths) if abs(length - len(chosen)) <= 8]
        pair = {"prompt": prompt, "chosen": chosen, "rejected": others[draw.choice(near)]}
        print(json.dumps(pair, ensure_ascii=False))


if __name__ == "__main__":
    main()
