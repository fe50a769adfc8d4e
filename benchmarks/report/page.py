"""The page of a report: one HTML file that contains everything."""
import base64
import html
from pathlib import Path

from torchsparsekv_benchmarks.report.figures import Drawn, Figure
from torchsparsekv_benchmarks.report.load import Result
from torchsparsekv_benchmarks.report.style import DPI

STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --paper: #fff; --ink: #1f2430; --soft: #4a515e; --faint: #6b7280;
  --line: #e4e7ec; --code: #f1f3f6; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --back: #14171d; --paper: #1c2028; --ink: #e3e6eb; --soft: #b4bac5;
  --faint: #949cab; --line: #323844; --code: #282d37; --link: #7fb6f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 20px 80px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 0 0 .8rem; }
h3 { font-size: .95rem; margin: 0 0 .8rem; color: var(--soft); }
.lead { color: var(--soft); margin: 0 0 1.6rem; max-width: 46rem; }
nav { display: flex; flex-wrap: wrap; gap: 8px; margin: 0 0 2rem; }
nav a { background: var(--paper); border: 1px solid var(--line); border-radius: 999px; padding: 3px 13px;
  font-size: .86rem; color: var(--ink); text-decoration: none; }
nav a:hover { border-color: var(--link); color: var(--link); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 24px 26px;
  margin: 0 0 24px; }
figure { margin: 0; }
figure + figure { border-top: 1px solid var(--line); margin-top: 22px; padding-top: 22px; }
figure img { display: block; width: var(--width); max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
h3:not(:first-of-type) { margin-top: 1.6rem; }
figcaption, .note { color: var(--soft); font-size: .9rem; margin-top: 14px; max-width: 52rem; }
.made { display: block; color: var(--faint); font-size: .8rem; margin-top: 6px; }
code { font: .86em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--code);
  border-radius: 4px; padding: 1px 5px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; }
th { color: var(--faint); font-weight: 600; }
details { margin-top: .8rem; }
details summary { cursor: pointer; font-weight: 600; }
ul { padding-left: 1.2rem; margin: 0; }
@media (max-width: 600px) {
  main { padding: 24px 8px 60px; }
  section { padding: 16px 12px; }
  figure img { max-width: max(100%, calc(0.66 * var(--width))); } /* wider pictures scroll instead of shrinking */
}
"""


def _figure(title: str, drawn: Drawn, picture: bytes, *, headed: bool) -> str:
    data, width = base64.b64encode(picture).decode(), int.from_bytes(picture[16:20], "big") * 96 // DPI
    s = drawn.sources[0]
    files = ", ".join(f"<code>{html.escape(r.path.name)}</code>" for r in drawn.sources)
    made = f"{html.escape(s.about_model)}. {html.escape(s.hardware)}; {html.escape(s.versions)}. From {files}."
    head, about = f"<h3>{html.escape(drawn.tag)}</h3>" if headed else "", html.escape(f"{title}: {drawn.tag}")
    image = f'<img style="--width:{width}px" src="data:image/png;base64,{data}" alt="{about}">'
    return (
        f'<figure>{head}<div class="wide">{image}</div>'
        f'<figcaption>{html.escape(drawn.caption)}<span class="made">{made}</span></figcaption></figure>'
    )


def table(rows: list[dict[str, object]], left: int) -> str:
    """The first `left` columns are text."""
    head = list(rows[0])
    kind = lambda i: "" if i < left else ' class="n"'  # noqa: E731
    lines = ["".join(f"<th{kind(i)}>{html.escape(c)}</th>" for i, c in enumerate(head))]
    lines += ["".join(f"<td{kind(i)}>{html.escape(str(r[c]))}</td>" for i, c in enumerate(head)) for r in rows]
    return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _sources(results: list[Result]) -> str:
    rows: list[dict[str, object]] = [
        {"file": r.path.name, "made by": "; ".join(r.commands), "model": r.about_model, "on": r.hardware,
         "with": r.versions}
        for r in results
    ]  # fmt: skip
    return f'<section id="sources"><h2>Sources</h2>{table(rows, left=5)}</section>'


Made = list[tuple[Figure, list[tuple[Drawn, bytes]]]]


def _links(made: Made) -> str:
    return "".join(f'<a href="#{f.name}">{html.escape(f.title)}</a>' for f, _ in made)


def _sections(made: Made) -> str:
    return "".join(
        f'<section id="{f.name}"><h2>{html.escape(f.title)}</h2>'
        + "".join(_figure(f.title, drawn, picture, headed=len(pictures) > 1) for drawn, picture in pictures)
        + "</section>"
        for f, pictures in made
    )


def page(
    made: Made, absent: list[Figure], scores: str, details: str, results: list[Result]
) -> str:
    leading, others = ([x for x in made if x[0].leads is leads] for leads in (True, False))
    links = _links(leading) + ('<a href="#scores">Scores</a>' if scores else "") + _links(others)
    body = _sections(leading) + scores + _sections(others)
    if absent:
        items = "".join(
            f"<li>{html.escape(f.title)}: a file of <code>{html.escape(f.provided_by)}</code></li>" for f in absent
        )
        body += f'<section id="absent"><h2>Not in this report</h2><ul>{items}</ul></section>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>torchsparsekv report</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>'
        f"<h1>torchsparsekv</h1><p class=lead>Sparse KV-cache retrieval: what it costs in answers and what it saves in "
        f"time and memory. Every figure says what it was measured on.</p><nav>{links}</nav>{body}{details}"
        f"{_sources(results)}</main></body></html>\n"
    )


def write(path: Path, text: str, pictures: dict[str, bytes]) -> list[Path]:
    """The page, and the figures beside it as PNG files that begin with its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    out = [path]
    for name, data in pictures.items():
        out.append(path.with_name(f"{path.stem}_{name}.png"))
        out[-1].write_bytes(data)
    return out
