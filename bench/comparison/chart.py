"""The chart for the README: plain SVG that reads in light and in dark, with the reader's own fonts and without a library."""

import html
import math

from .report import value

WIDTH, LABELS, BAR_END = 760, 230, 660
ROW, BAR, HEAD, GAP = 22, 14, 30, 18

STYLE = """
  text { font: 12px sans-serif; fill: #24292f; }
  .head { font-weight: bold; }
  .label { text-anchor: end; }
  .note { fill: #57606a; }
  .bar { fill: #8c959f; }
  .ours { fill: #0969da; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .note { fill: #9198a1; }
    .bar { fill: #6e7681; }
    .ours { fill: #4493f8; }
  }
"""

PANELS = (
    ("create to first result", ("create-python", "create-bash")),
    ("warm call", ("warm-python", "warm-bash")),
    ("8 creations at a time, per creation", ("together",)),
    ("one more idle session", ("memory",)),
)
"""Each with the measures that it shows; the first that a system has."""


def amount(figure):
    return figure.memory if figure.memory is not None else figure.ratio


def panel_rows(systems, figures, keys):
    rows = []
    for key, adapter in systems.items():
        own = {figure.measure: figure for figure in figures if figure.system == key and not figure.failed}
        shown = next((own[name] for name in keys if name in own and (amount(own[name]) or 0) > 0), None)
        if shown:
            other = "" if "python" in adapter.languages else " (bash)"
            rows.append((amount(shown), adapter.title + other, value(shown), adapter.ours))
    return sorted(rows)


def lengths(amounts):
    """Bars on a logarithmic scale from the power of ten below the smallest: the figures are three orders of magnitude apart."""
    least = 10 ** math.floor(math.log10(min(amounts)))
    most = max(max(amounts), least * 10)
    span = math.log10(most / least)
    return [max(2.0, (BAR_END - LABELS) * math.log10(amount / least) / span) for amount in amounts]


def chart(systems, figures, caption):
    """`systems`: adapters by key."""
    body, y = [], 4
    for title, keys in PANELS:
        rows = panel_rows(systems, figures, keys)
        if not rows:
            continue
        body.append(f'<text class="head" x="8" y="{y + 16}">{html.escape(title)}</text>')
        y += HEAD
        for (_, label, said, ours), length in zip(rows, lengths([row[0] for row in rows])):
            middle = y + BAR - 3
            body.append(f'<text class="label" x="{LABELS - 8}" y="{middle}">{html.escape(label)}</text>')
            body.append(f'<rect class="{"ours" if ours else "bar"}" x="{LABELS}" y="{y}" width="{length:.1f}" '
                        f'height="{BAR}" rx="2"/>')
            body.append(f'<text x="{LABELS + length + 6:.1f}" y="{middle}">{html.escape(said)}</text>')
            y += ROW
        y += GAP
    body.append(f'<text class="note" x="8" y="{y + 10}">{html.escape(caption)}</text>')
    y += 22
    lines = "\n".join(body)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">\n'
            f"<title>carrel beside other ways to run code</title>\n<style>{STYLE}</style>\n{lines}\n</svg>\n")
