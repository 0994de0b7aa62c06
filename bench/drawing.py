"""An SVG of bars: for each workload everybody's median rate, against the best."""

from xml.sax.saxutils import escape

from .run import median
from .targets import Figures, is_floor, is_ours

STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}"
    ".us{fill:#2a6fb0}.floor{fill:#999}.peer{fill:#d9a441}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


def drawing(titles: dict[str, str], figures: Figures) -> str:
    """Return the drawing of the workloads that have titles."""
    bars: list[str] = []
    y = 30
    for name, title in titles.items():
        rates = {who: median(rows, "rate") or 0.0 for who, rows in figures[name].items() if rows}
        if not rates:
            continue
        bars.append(f'<text x="10" y="{y}" class="title">{escape(title)}</text>')
        best = max(rates.values()) or 1.0
        for who, rate in rates.items():
            y += 18
            width = 360 * rate / best
            kind = "us" if is_ours(who) else "floor" if is_floor(who) else "peer"
            bars.append(
                f'<text x="230" y="{y}" text-anchor="end">{escape(who)}</text>'
                f'<rect x="240" y="{y - 11}" width="{width:.1f}" height="13" class="{kind}"/>'
                f'<text x="{246 + width:.1f}" y="{y}">{rate:,.0f}</text>'
            )
        y += 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="700" height="{y}" role="img">'
        f"<title>Rates by workload, medians</title><style>{STYLE}</style>{''.join(bars)}</svg>\n"
    )
