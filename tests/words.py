"""Finds private words in pages, comments and messages: python -m tests.words [FILE or FOLDER ...]

docs/design/words.md lists the words, each with the field's own. Without arguments: README.md, CONTRIBUTING.md and docs/.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "design" / "words.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(file for file in sorted((ROOT / "docs").rglob("*.md")) if file != LIST),
]
CODE = re.compile(  # code in a page, targets of links, and tables that a command writes
    r"<!-- made by[\s\S]*<!-- made by|^ {4}.*|^```[\s\S]*?^```|`[^`]*`|\]\([^)]*\)", re.MULTILINE
)


def words() -> dict[str, str]:
    """{regular expression: what to write instead}, from the table of the list."""
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", LIST.read_text(encoding="utf-8"), re.MULTILINE)
    return {pattern.replace(r"\|", "|"): instead for cell, instead in rows for pattern in re.findall(r"`([^`]*)`", cell)}


def found_in(path: Path) -> Iterator[str]:
    """A line for each private word of a page or source file, also where the word spans two lines of the file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = CODE.sub(lambda code: re.sub(r"[^\n]", "_", code[0]), text)
    for pattern, instead in words().items():
        for hit in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            line = text.count("\n", 0, hit.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}: {' '.join(hit[0].split())!r}: {instead}"


def main() -> None:
    """Exit code 1 where a word is found."""
    paths = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    hits = [hit for file in files for hit in found_in(file)]
    print("\n".join(hits))
    sys.exit(bool(hits))


if __name__ == "__main__":
    main()
