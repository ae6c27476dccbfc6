"""How pages look: light or dark as the browser is set, black on white on paper, narrow on a phone.

Tables with more columns than there is room for become a block for each of their lines.
"""

from __future__ import annotations

# A table folds where the place for it is narrower than the one of these that it needs.
WIDTHS = (240, 270, 300, 325, 360, 400, 480, 560, 640, 720, 800, 900, 1000, 1100, 1250, 1400)

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--dim:#59636e;--line:#d5dae0;
--panel:#f5f7f9;--bar:#2f6fb3;--mark:#a3360a;
--c0:#1f5fa8;--c1:#a3360a;--c2:#1a7340;--c3:#7b3fa0;--c4:#846000;--c5:#a01e5a}
@media screen and (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e8ebee;--dim:#a3adb8;
--line:#3a424b;--panel:#1d2227;--bar:#5d9fe3;--mark:#f59a6b;
--c0:#6fb0f2;--c1:#f59a6b;--c2:#6cc98d;--c3:#c596e8;--c4:#dcb74f;--c5:#f08bb8}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:1.25rem 1rem 2rem;background:var(--paper);
color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 .25rem}
h2{font-size:1.1rem;margin:2rem 0 .5rem}
h3{font-size:.95rem;margin:0 0 .25rem}
.table+figure,.table+h3{margin-top:1.25rem}
p{margin:.25rem 0 .75rem;max-width:46rem}
p,figcaption,footer{color:var(--dim)}
.warning{color:var(--ink);border:2px solid var(--mark);padding:.5rem .75rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.25rem,1fr));gap:.6rem;
margin:1rem 0}
dl.long{grid-template-columns:repeat(auto-fill,minmax(min(100%,14rem),1fr))}
dl>div{background:var(--panel);border:1px solid var(--line);border-radius:6px;
padding:.5rem .7rem;break-inside:avoid}
dt{color:var(--dim);font-size:.85rem}
dd{margin:0}
dd.figure{font-size:1.12rem;font-weight:650;font-variant-numeric:tabular-nums}
dd.meaning{color:var(--dim);font-size:.82rem;line-height:1.35}
figure{margin:0;break-inside:avoid}
figcaption{margin:0 0 .5rem;max-width:46rem}
.pair{display:grid;grid-template-columns:minmax(0,3fr) minmax(0,2fr);gap:1rem 2rem}
.several{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,20rem),1fr));
gap:1.25rem 1.5rem;margin-bottom:1rem}
@media (max-width:760px){.pair{grid-template-columns:minmax(0,1fr)}}
@media print{.pair{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}}
svg.chart{display:block;overflow:visible}
svg text{font-size:11px;fill:var(--dim);font-variant-numeric:tabular-nums}
svg text.name{fill:var(--mark);font-weight:600}
.grid{stroke:var(--line);stroke-width:1}
.bar{fill:var(--bar)}
.asked{fill:var(--panel);stroke:var(--dim);stroke-width:1}
svg text.source{font-size:12px;fill:var(--ink);font-weight:500}
.mark{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:4 3}
.curve{fill:none;stroke-width:2;stroke:var(--c0)}
.shape{fill:var(--paper)}
.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}.c4{stroke:var(--c4)}
.c5{stroke:var(--c5)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;margin:0 0 .25rem;padding:0}
.legend svg{vertical-align:-2px}
.table{container-type:inline-size;margin:0 0 .5rem}
table{border-collapse:collapse;max-width:100%;font-size:13px;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--dim);padding:0 0 .25rem}
th,td{padding:3px 8px;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}
th:first-child,td:first-child{padding-left:0}
th{font-weight:500}
thead th{color:var(--dim);vertical-align:bottom;border-bottom-width:2px}
th.text,td.text{text-align:left}
table.facts{width:100%}
table.facts th{white-space:nowrap;width:7rem;color:var(--dim)}
th.text{white-space:nowrap}
th.name{min-width:11rem;white-space:normal}
td.number,th.number{white-space:nowrap;overflow-wrap:normal}
tr{break-inside:avoid}
thead th.number{white-space:normal}
footer{margin-top:2rem;border-top:1px solid var(--line);padding-top:.5rem;font-size:.85rem}
@media print{@page{margin:14mm}body{padding:0;max-width:none;font-size:12px}
table{font-size:10.5px}th,td{padding:2px 6px}h2,h3,caption{break-after:avoid}}
"""

_PRINTED = 0.8  # of the width that a table needs on a screen: letters are smaller
_FOLDED = """
@media {medium}{{@container (max-width:{below:.2f}px){{.fold{width},.fold{width} tbody,
.fold{width} tr,.fold{width} th,.fold{width} td{{display:block;text-align:left;padding:0;border:0;
min-width:0}}
.fold{width} thead{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}}
.fold{width} tr{{display:grid;grid-template-columns:1fr 1fr;gap:0 1rem;padding:.4rem 0;
border-bottom:1px solid var(--line)}}
.fold{width} tbody th:first-child{{grid-column:1/-1;font-weight:650}}
.fold{width} th,.fold{width} td{{white-space:normal}}
.fold{width} td::before{{content:attr(data-of) " ";color:var(--dim)}}}}}}
"""


def style(used: set[int]) -> str:
    """The style sheet, for tables that fold at these widths."""
    folded = (
        _FOLDED.format(width=width, medium=medium, below=width * scale - 0.02)
        for width in sorted(used)
        for medium, scale in (("screen", 1), ("print", _PRINTED))
    )
    return (_STYLE + "".join(folded)).strip()
