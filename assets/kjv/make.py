"""Write the King James Bible, one text file per book, after apt-get install bible-kjv bible-kjv-text."""

import re
import subprocess
from pathlib import Path

text = subprocess.run(["bible", "-l0", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
books: dict[str, list[str]] = {}
chapter: list[str] = []
for line in text.splitlines():
    if verse := re.match(r"\s+\d+ (.*)", line):
        chapter.append(verse[1].strip())
    elif heading := re.match(r"(\S.*) (\d+)$", line):
        chapter = books.setdefault(heading[1], [])
        chapter.append("" if chapter else heading[1] + "\n")
        chapter.append(f"Chapter {heading[2]}")

for number, (book, lines) in enumerate(books.items(), 1):
    name = f"{number:02}-{book.lower().replace(' ', '-')}.txt"
    Path(__file__).with_name(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
