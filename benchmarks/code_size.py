"""Lines of code by package, without comments, blank lines and docstrings: python -m benchmarks.code_size [FOLDER]

A line counts if it holds a token of the program; every line of a string that is not a docstring counts. A string right
after a field of a class documents that field, and is a docstring here. FOLDER is a checkout (default: this one).
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

NOT_CORE = ("titanlite/data/prepare", "titanlite/plan", "titanlite/tools", "titanlite/verify")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(source: str) -> set[int]:
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement.value.value, str)
        for line in range(statement.lineno, statement.end_lineno + 1)
    }


def code_lines(source: str) -> int:
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in NOT_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstring_lines(source))


def package_of(file: Path) -> str:
    """titanlite/data/prepare/shards.py -> titanlite/data/prepare; files right in titanlite/ are titanlite/*.py."""
    folder = file.parent.as_posix()
    return "titanlite/*.py" if folder == "titanlite" else folder if folder in NOT_CORE else "/".join(file.parts[:-1][:2])


def sizes(root: Path) -> tuple[Counter, Counter]:
    """(lines of code, files) of each package in titanlite/ and of models/."""
    lines, files = Counter(), Counter()
    for folder in ("titanlite", "models"):
        for file in sorted((root / folder).rglob("*.py")):
            package = package_of(file.relative_to(root))
            lines[package] += code_lines(file.read_text(encoding="utf-8"))
            files[package] += 1
    return lines, files


def totals(lines: Counter) -> tuple[int, int]:
    """The core, which is titanlite/ without NOT_CORE; and all of titanlite/."""
    everything = sum(count for package, count in lines.items() if package.startswith("titanlite/"))
    return everything - sum(lines[package] for package in NOT_CORE), everything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1], metavar="FOLDER")
    lines, files = sizes(parser.parse_args().folder)
    core, everything = totals(lines)
    for package, count in sorted(lines.items()):
        print(f"{package:<24} {files[package]:>3} files {count:>7,} lines")
    print(f"\ncore, titanlite/ without data/prepare/, plan/, tools/ and verify/: {core:,} lines")
    print(f"all of titanlite/: {everything:,} lines")


if __name__ == "__main__":
    main()
