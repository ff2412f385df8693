"""The style sheet of report.html: for light and dark themes and wide and narrow screens, without external files."""

COLOURS = {"blue": "#0072b2", "orange": "#d55e00", "green": "#009e73", "purple": "#aa4499", "grey": "#777777"}
"""Colours on a white background, the same as in the plots of a run."""
ON_DARK = {"blue": "#56b4e9", "orange": "#f0884a", "green": "#3fc79a", "purple": "#d787c4", "grey": "#9aa0a8"}


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


CSS = f"""
:root{{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--ink:#1d2127;--muted:#626a75;--rule:#e3e5e8;--soft:#f2f3f5;
--problem:#b3261e;--caution:#a35200;{_variables(COLOURS)}}}
@media (prefers-color-scheme:dark){{:root{{--page:#14171b;--card:#1b1f25;--ink:#e4e7eb;--muted:#9aa3af;--rule:#323943;
--soft:#242a32;--problem:#ff8a80;--caution:#ffb267;{_variables(ON_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:break-word}}
main,header,footer{{max-width:1120px;margin:0 auto;padding:0 20px}}
header{{padding-top:32px}}
h1{{font-size:26px;line-height:1.25;margin:0 0 4px}}
h2{{font-size:19px;margin:44px 0 12px;scroll-margin-top:12px}}
h3{{font-size:15px;margin:0 0 6px}}
p{{margin:0 0 10px}}
a{{color:var(--blue);text-decoration:none}} a:hover{{text-decoration:underline}}
.sub,.below{{color:var(--muted);font-size:13.5px}}
.below{{margin:8px 0 0;max-width:90ch}}
nav{{display:flex;flex-wrap:wrap;gap:4px 16px;margin:14px 0 0;font-size:14px}}
.grid{{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr))}}
.facts{{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));margin:22px 0 14px}}
.card{{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;min-width:0}}
.card p:last-child{{margin:0}}
.fact b{{display:block;font-size:25px;line-height:1.2;font-variant-numeric:tabular-nums}}
.fact span{{color:var(--muted);font-size:13px}}
figure{{margin:0}} figure svg{{display:block;width:100%;height:auto;max-width:470px;margin:0 auto}}
figure svg text{{font-family:inherit!important}}
figcaption{{font-weight:600;font-size:14px;margin-bottom:6px}}
.scroll{{overflow-x:auto;border:1px solid var(--rule);border-radius:10px;background:var(--card);margin-top:14px}}
table{{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}}
th,td{{padding:7px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--rule)}}
thead th{{border-top:0;color:var(--muted);font-weight:600;font-size:12.5px;vertical-align:bottom}}
th:first-child,td:first-child{{text-align:left;position:sticky;left:0;background:var(--card);min-width:min(210px,36vw);
max-width:46vw;white-space:normal;overflow-wrap:break-word;font-weight:500}}
table.words td{{text-align:left;white-space:normal;width:100%;overflow-wrap:anywhere}}
table.words td:first-child{{width:auto;min-width:130px;color:var(--muted)}}
ul.remarks{{list-style:none;margin:0;padding:0;display:grid;grid-template-columns:minmax(0,1fr);gap:10px;
overflow-wrap:anywhere}}
ul.remarks li{{background:var(--card);border:1px solid var(--rule);border-left:4px solid var(--blue);border-radius:8px;
padding:10px 14px}}
ul.remarks li.problem{{border-left-color:var(--problem)}} ul.remarks li.caution{{border-left-color:var(--caution)}}
.tag{{display:inline-block;font-size:12px;font-weight:600;border-radius:20px;padding:1px 9px;background:var(--soft);
margin-right:8px}}
.problem .tag,.tag.lenient{{color:var(--problem)}} .caution .tag,.tag.strict{{color:var(--caution)}}
.change{{display:block;color:var(--muted);margin-top:3px}}
details{{background:var(--card);border:1px solid var(--rule);border-radius:8px;margin-top:8px}}
summary{{cursor:pointer;padding:9px 14px}} summary:hover{{background:var(--soft)}}
details>div{{padding:4px 14px 14px}}
.turn{{color:var(--muted);font-size:13px;margin:14px 0 4px;border-top:1px dashed var(--rule);padding-top:10px}}
.message{{display:grid;grid-template-columns:84px minmax(0,1fr);gap:10px;margin:6px 0}}
.message>span{{font-size:12.5px;font-weight:600;color:var(--muted);padding-top:5px}}
.message pre{{margin:0;padding:6px 10px;background:var(--soft);border-radius:6px;white-space:pre-wrap;
overflow-wrap:anywhere;font-size:13px;
font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
.message.assistant>span{{color:var(--green)}} .message.assistant pre{{background:none;border:1px solid var(--rule)}}
footer{{color:var(--muted);font-size:13px;padding:36px 20px 48px}}
@media (max-width:560px){{body{{font-size:14.5px}}main,header,footer{{padding-left:14px;padding-right:14px}}
h1{{font-size:22px}}.message{{grid-template-columns:1fr;gap:0}}.facts{{grid-template-columns:1fr 1fr}}
.fact b{{font-size:21px}}th,td{{padding:6px 9px}}table.words td:first-child{{min-width:100px}}}}
"""
