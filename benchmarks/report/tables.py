"""Tables of the docs, written between their markers, and the pictures (`make docs`).

    python -m torchsparsekv_benchmarks.report.tables              # every page with a marker, and the pictures
    python -m torchsparsekv_benchmarks.report.tables --list       # the names of all tables
    python -m torchsparsekv_benchmarks.report.tables --show NAME

A page has the lines `<!-- table: NAME -->` and `<!-- end -->`. The text between them is made from result files. If a
result file is missing, or older than a table or picture allows, the command names the file and writes nothing.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from torchsparsekv_benchmarks.report import pictures, tables_code, tables_quality, tables_serving, tables_speed
from torchsparsekv_benchmarks.report.markdown import RESULTS, ROOT, TABLES

MARKED = re.compile(r"^<!-- table: (?P<name>\S+) -->\n.*?^<!-- end -->$", re.M | re.S)
MODULES = (tables_speed, tables_serving, tables_quality, tables_code)  # importing them fills TABLES


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def made(name: str, results: Path = RESULTS) -> str:
    if name not in TABLES:
        raise ValueError(f"there is no table {name}; there are: {', '.join(sorted(TABLES))}")
    return TABLES[name].text(results)


def current(text: str, results: Path = RESULTS) -> str:
    """The text of a page with its tables as the files of results have them."""
    if text.count("<!-- table:") != len(MARKED.findall(text)):
        raise ValueError("a marker `<!-- table: NAME -->` lacks its `<!-- end -->`, or shares its line")
    return MARKED.sub(lambda m: f"<!-- table: {m['name']} -->\n{made(m['name'], results)}\n<!-- end -->", text)


def write(every: Iterable[Path], results: Path = RESULTS) -> list[Path]:
    """Make all pages, then write those that changed."""
    new: dict[Path, str] = {}
    for page in every:
        old = page.read_text()
        try:
            text = current(old, results)
        except ValueError as e:
            raise ValueError(f"{page}: {e}") from e
        if text != old:
            new[page] = text
    for page, text in new.items():
        page.write_text(text)
    return list(new)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true", help="print the names of all tables")
    p.add_argument("--show", metavar="NAME", help="print one table")
    o = p.parse_args()
    try:
        if o.list or o.show:
            print("\n".join(sorted(TABLES)) if o.list else made(o.show))
            return 0
        for picture in pictures.PICTURES:
            picture.held()  # what cannot be made stops here, before anything is written
        for path in [*write(pages()), *pictures.write()]:
            print(path.relative_to(ROOT))
    except (ValueError, RuntimeError) as e:
        print(f"tables: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
