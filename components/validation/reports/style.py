"""How the report looks, on light and on dark; what is on it is `page`'s.

Contrasts of text are at least 4.5 to 1 on either ground (WCAG 2.1, 1.4.3); nothing is told by colour alone.
"""

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5b6675;--paper:#fff;--line:#dfe4ea;--now:#1d4ed8;--before:#b3bcc8;
--mark:#b42318;--link:#1d4ed8}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#a3adba;--paper:#12161c;--line:#2f3743;--now:#7aa2ff;
--before:#4d5868;--mark:#ff8a7a;--link:#9db8ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:1rem;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.35rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .4rem}a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.3rem .6rem}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:.6rem 0;padding:0}
small,.soft,caption{color:var(--soft)}caption{text-align:left;padding:.2rem 0;font-size:.9em}
table{border-collapse:collapse;width:100%}.scroll{overflow-x:auto}
th,td{padding:.3rem .5rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
thead th{white-space:nowrap}tbody th{font-weight:600}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.badge{display:inline-block;padding:0 .5em;border-radius:.6em;color:#fff;font-size:.82em;font-weight:600;
white-space:nowrap}
.block{background:#b42318}.warn{background:#9a3c06}.pass{background:#067647}.info{background:#5b6675}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:.6rem;margin:.8rem 0}
.tiles div{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .7rem}
.tiles b{display:block;font-size:1.15em;overflow-wrap:anywhere}
.cards{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(255px,1fr))}
.card{border:1px solid var(--line);border-radius:.5rem;padding:.6rem;overflow-wrap:anywhere}
.card.moved{border:2px solid var(--mark)}.card h3{margin:0 0 .2rem;font-size:1rem}
.card p{margin:.15rem 0;font-size:.87em}
.card svg{width:100%;height:72px;display:block;margin:.35rem 0}
.card details{font-size:.85em}summary{cursor:pointer}
rect.now{fill:var(--now)}rect.before{fill:var(--before)}
svg.interval{width:120px;height:14px;vertical-align:middle}
.interval .axis{stroke:var(--line);stroke-width:2}.interval .band{stroke:var(--now);stroke-width:4}
.interval .dot{fill:var(--ink)}.interval .mark{stroke:var(--mark);stroke-width:2}
.key i{display:inline-block;width:.9em;height:.7em;margin:0 .3em 0 .8em}
.key .k1{background:var(--now)}.key .k2{background:var(--before)}
@media print{.card{break-inside:avoid}.skip,nav{display:none}}
"""
