"""The exported file is self-contained, has the answers of the server, and no text of a run is interpreted as markup."""

import base64
import html.parser
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.record.trajectories import write_groups
from mtrl.types import Group, StopReason
from mtrl.view import export as exporting
from mtrl.view.__main__ import main
from mtrl.view.export import csp_hash, embedded, export, module, modules, worth_reading
from mtrl.view.query import Query
from mtrl.view.server import to_json
from tests.view.made_runs import HOSTILE, ROOT, make_run, make_trajectory, make_turn

BREAKERS = [
    "</script>",
    "<!--",
    "<script>",
    "]]>",
    "\u2028",
    "\u2029",
    "&lt;",
    "\ud800",
    "\x00",
    "</SCRIPT\n>",
    "'\"\\",
]


@pytest.fixture
def static(tmp_path, monkeypatch):
    """A page of four files, since the tests are only about the packing."""
    folder = tmp_path / "static"
    folder.mkdir()
    files = {
        "index.html": "<!doctype html>\n<html><head>\n"
        '<meta charset="utf-8">\n<link rel="stylesheet" href="/static/a.css">\n'
        '<script type="module" src="/static/app.js"></script>\n'
        "</head>\n<body>\n<main></main>\n</body>\n</html>\n",
        "a.css": "main { color: red; }\n",
        "app.js": 'import { one } from "./one.js";\nimport "./two.js";\n'
        'import {\n  other,\n} from "./two.js";\none(other);\n',
        "one.js": "import * as two from './two.js';\nexport const one = two.other;\n",
        "two.js": 'import { one } from "./one.js";\nexport const other = () => "</script>" + one;\n',
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(exporting, "STATIC", folder)
    return folder


class Reader(html.parser.HTMLParser):
    """Parser of a page: its elements with their attributes and texts, as in a browser."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self._open = [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._open = [tag, dict(attributes), ""]
        self.elements.append(self._open)

    def handle_data(self, data):
        if self._open is not None:
            self._open[2] += data

    def handle_endtag(self, tag):
        self._open = None

    def all(self, tag):
        return [(attributes, text) for name, attributes, text in self.elements if name == tag]


def data_of(path):
    reader = Reader(path.read_text(encoding="utf-8"))
    ((_, text),) = [e for e in reader.all("script") if e[0].get("id") == "mtrl-export"]
    return json.loads(text)


def hostile_run(path):
    run = make_run(path, steps=2, name=HOSTILE, config={"note": "".join(BREAKERS[:6])})
    made = [make_trajectory(b, turns=[make_turn(text=b, observed=HOSTILE)]) for b in BREAKERS]
    write_groups(run / "trajectories", "train", 9, [Group("g", {}, made)])
    return run


def test_the_file_stands_alone(static, api_of, made_run, tmp_path):
    out = tmp_path / "out.html"
    export(api_of(made_run), out, 10)
    text = out.read_text(encoding="utf-8")
    reader = Reader(text)
    assert not [a for tag, a, _ in reader.elements if "src" in a or "href" in a]
    types = [a.get("type") for a, _ in reader.all("script")]
    assert types == ["importmap", "application/json", "module"]
    ((_, style),) = reader.all("style")
    assert style == "main { color: red; }\n"
    assert text.index("<style>") < text.index("<main>") < text.index("mtrl-export")


def test_its_policy_lets_only_its_own_scripts_run(static, api_of, made_run, tmp_path):
    out = tmp_path / "out.html"
    export(api_of(made_run), out, 3)
    reader = Reader(out.read_text(encoding="utf-8"))
    ((policy, _),) = [e for e in reader.all("meta") if "http-equiv" in e[0]]
    assert policy["http-equiv"] == "Content-Security-Policy"
    scripts = [text for a, text in reader.all("script") if a.get("type") in ("importmap", "module")]
    wanted = " ".join(map(csp_hash, scripts))
    assert f"script-src {wanted} data:;" in policy["content"]
    assert f"style-src {csp_hash(reader.all('style')[0][1])};" in policy["content"]
    assert policy["content"].startswith("default-src 'none';") and "unsafe" not in policy["content"]
    elements = [tag for tag, _, _ in reader.elements]
    assert elements.index("meta") < elements.index("script")


def test_modules_go_by_the_names_of_the_import_map(static, api_of, made_run, tmp_path):
    out = tmp_path / "out.html"
    export(api_of(made_run), out, 1)
    ((_, text),) = [e for e in Reader(out.read_text()).all("script") if e[0].get("type") == "importmap"]
    addresses = json.loads(text)["imports"]
    assert set(addresses) == {"mtrl/app.js", "mtrl/one.js", "mtrl/two.js"}
    sources = {
        n: base64.b64decode(a.removeprefix("data:text/javascript;base64,")).decode() for n, a in addresses.items()
    }
    assert 'import { one } from "mtrl/one.js";' in sources["mtrl/app.js"] and "./" not in sources["mtrl/app.js"]
    assert "import * as two from 'mtrl/two.js';" in sources["mtrl/one.js"]
    assert list(modules("app.js")) == ["app.js", "one.js", "two.js"]
    assert module("two.js").endswith('() => "</script>" + one;\n')


def test_the_data_is_what_the_server_answers(static, api_of, made_run, tmp_path):
    api = api_of(made_run)
    out = tmp_path / "out.html"
    export(api, out, 10_000)
    data = data_of(out)
    (run,) = api.library.runs
    routes = data["routes"]
    assert (data["version"], data["left_out"], data["runs_left_out"]) == (1, 0, 0)
    assert routes["/api/runs"] == json.loads(to_json(api.runs(Query())))
    for what in ("config", "metrics", "timeline", "alarms", "files"):
        assert routes[f"/api/runs/one/{what}"] == json.loads(to_json(getattr(api, what)(run, Query())))
    listed = api.trajectories(run, Query([("limit", "500")]))
    exported = routes["/api/runs/one/trajectories"]
    assert exported["items"] == json.loads(to_json(listed["items"])) and exported["total"] == listed["total"]
    for item in exported["items"]:
        answer = api.trajectory(run, item["file"], str(item["line"]), Query())
        assert routes[f"/api/runs/one/trajectory/{item['file']}/{item['line']}"] == json.loads(to_json(answer))
    assert len(routes) == 2 + 6 + 1 + listed["total"]


@pytest.mark.parametrize("most", [0, 1, 7, 20])
def test_what_is_left_out_is_counted(static, api_of, made_run, tmp_path, most):
    api = api_of(made_run)
    printed = export(api, tmp_path / "out.html", most)
    data = data_of(tmp_path / "out.html")
    items = data["routes"]["/api/runs/one/trajectories"]["items"]
    total = len(api.library.runs[0].index.rows())
    assert (len(items), data["left_out"]) == (most, total - most)
    assert f"{most} trajectories ({total - most} were left out)" in printed
    order = [(-item["step"], item["kind"], item["line"]) for item in items]
    assert order == sorted(order)


def test_a_file_that_grows_too_large_is_cut(static, api_of, made_run, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "LARGEST", 20_000)
    export(api_of(made_run), tmp_path / "out.html", 50)
    data = data_of(tmp_path / "out.html")
    exported = len(data["routes"]["/api/runs/one/trajectories"]["items"])
    assert 1 <= exported < 20 and data["left_out"] == 60 - exported


def test_several_runs_share_the_room(static, api_of, tmp_path):
    runs = [make_run(tmp_path / name, steps=2, seed=n) for n, name in enumerate(["one", "two", "three"])]
    export(api_of(*runs), tmp_path / "out.html", 30)
    routes = data_of(tmp_path / "out.html")["routes"]
    assert [len(routes[f"/api/runs/{run.name}/trajectories"]["items"]) for run in runs] == [10, 10, 10]


def test_disagreements_are_exported_first_and_then_whole_groups(api_of, tmp_path):
    run = make_run(tmp_path / "run", steps=0)
    lenient = make_trajectory("lenient", "odd", score=0.0)
    failed = make_trajectory("failed", "odd", index=1, stop_reason=StopReason.TIMEOUT)
    plain = [[make_trajectory(group=f"g{g}", index=n, score=1.0) for n in range(3)] for g in range(5)]
    write_groups(run / "trajectories", "train", 1, [Group("odd", {}, [lenient, failed])])
    write_groups(run / "trajectories", "train", 5, [Group("g", {}, made) for made in plain])
    api = api_of(run)
    (run,) = api.library.runs
    chosen = worth_reading(run.index.rows(), run, 8)
    assert {row.line.task_id for row in chosen} == {"lenient", "failed", "t"}
    assert [row.line.group_id for row in chosen if row.line.task_id == "t"] == ["g0"] * 3 + ["g1"] * 3


def test_nothing_in_a_run_ends_the_data(static, api_of, tmp_path):
    run = hostile_run(tmp_path / "run")
    out = tmp_path / "out.html"
    export(api_of(run), out, 1000)
    text = out.read_text(encoding="utf-8")
    block = re.search(
        r'<script type="application/json" id="mtrl-export">(.*?)</script>\n<script type="module">', text, re.DOTALL
    )
    assert not set("<>&\u2028\u2029\x00") & set(block[1])
    assert len(re.findall("<script", text)) == len(re.findall("</script>", text)) == 3
    data = data_of(out)
    texts = {
        turn["action"]["text"]
        for path, answer in data["routes"].items()
        if "/trajectory/" in path
        for turn in answer["turns"]
    }
    assert set(BREAKERS) <= texts


@settings(max_examples=200)
@given(st.recursive(st.text() | st.sampled_from(BREAKERS), lambda inner: st.dictionaries(st.text(), inner, max_size=3)))
def test_all_text_survives(value):
    text = embedded({"value": value})
    assert json.loads(text) == {"value": value}
    assert not set("<>&\u2028\u2029") & set(text)
    text.encode("utf-8")


def test_the_real_page_is_packed(api_of, made_run, tmp_path):
    export(api_of(made_run), tmp_path / "out.html", 5)
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert not [a for tag, a, _ in reader.elements if tag in ("script", "link", "img") and a.get("src")]
    assert not [a for tag, a, _ in reader.elements if "/static/" in str(a.get("href"))]
    ((_, imports),) = [e for e in reader.all("script") if e[0].get("type") == "importmap"]
    addresses = json.loads(imports)["imports"]
    for name, address in addresses.items():
        source = base64.b64decode(address.rpartition(",")[2]).decode()
        assert not re.search(r"""\b(from|import)\s*\(?["']\./""", source), name
        assert set(re.findall(r"""\bfrom\s+["'](mtrl/[^"']+)""", source)) <= set(addresses), name


def test_an_old_file_is_replaced_whole(static, api_of, made_run, tmp_path, monkeypatch):
    out = tmp_path / "out.html"
    out.write_text("old")
    monkeypatch.setattr(exporting, "page", lambda content: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(api_of(made_run), out, 3)
    assert out.read_text() == "old"


def test_the_command(made_run, tmp_path, capsys):
    assert main([str(made_run), "--export", str(tmp_path / "out.html"), "--max-trajectories", "4"]) == 0
    assert re.fullmatch(
        r".*out\.html: 1 run, 4 trajectories \(56 were left out\), \d+\.\d MiB\n", capsys.readouterr().out
    )


def test_the_command_needs_no_server(made_run, tmp_path):
    """The command imports neither torch nor the server."""
    code = (
        "import sys; from mtrl.view.__main__ import main; main(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'fastapi', 'uvicorn', 'matplotlib') if m in sys.modules])"
    )
    words = [str(made_run), "--export", str(tmp_path / "out.html")]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
