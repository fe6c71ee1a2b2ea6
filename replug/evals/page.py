"""How pages of ours look."""

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } td.best { font-weight: 700; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; }
pre { white-space: pre-wrap; background: #f6f6f4; padding: .6rem .8rem; border-radius: 6px; font-size: 12px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; } .muted { color: #777; font-size: 13px; }
mark { background: #fbe7c6; }
"""
