"""How the status page looks; what is on it is `showing.page`'s."""

STYLE = """
:root{color-scheme:light}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:980px;padding:12px;color:#111;background:#fff}
h1{font-size:1.4em;margin:.2em 0}h2{font-size:1.1em;margin:1.5em 0 .4em;border-bottom:1px solid #ddd}
.banner{border-radius:6px;padding:8px 12px;margin:.5em 0;border:1px solid;overflow-wrap:anywhere}
.good{background:#ecfdf5;border-color:#6ee7b7}.wait{background:#eff6ff;border-color:#93c5fd}
.bad{background:#fef2f2;border-color:#fca5a5}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:8px}
.tiles div{border:1px solid #ddd;border-radius:6px;padding:6px 10px;color:#444;font-size:.85em}
.tiles b{display:block;font-size:1.25em;color:#111;overflow-wrap:anywhere}
svg{width:100%;min-width:560px;height:auto}svg text{font:13px system-ui,sans-serif;fill:#444}
svg .mark{font-weight:600}svg .halo{paint-order:stroke;stroke:#fff;stroke-width:3px}
.grid{stroke:#eee}.level{stroke:#dc2626;stroke-dasharray:6 4}
.legend span{margin-right:1.2em}
.legend i{display:inline-block;width:1em;height:.35em;margin-right:.4em;vertical-align:middle}
.scroll{overflow-x:auto}.wide table{min-width:760px}
table{border-collapse:collapse;width:100%;font-size:.9em}
td,th{text-align:left;padding:4px 8px;border-bottom:1px solid #eee;vertical-align:top}
td:first-child{white-space:nowrap}
.foot{color:#666;font-size:.85em;margin-top:2em}
"""
