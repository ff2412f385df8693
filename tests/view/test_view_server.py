"""The viewer as a program: access, headers, hostile runs, live runs, and wrong commands."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import quote

import httpx
import pytest

from mtrl.record.trajectories import write_groups
from mtrl.types import Group, to_json
from mtrl.view.__main__ import main
from tests import forked
from tests.view.made_runs import HOSTILE, ROOT, TOKEN, make_run, make_trajectory, make_turn, viewing

STATIC = ROOT / "mtrl" / "view" / "static"


@pytest.fixture(scope="module")
def client(made_run):
    with viewing(made_run) as client:
        yield client


def raw(client, lines):
    """Send a request as raw text, and return the status line of the answer."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as sock:
        sock.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    return answer.decode("utf-8", "replace")


def test_the_page_and_its_files(client):
    page = client.get("/", headers={"Authorization": ""})
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == (STATIC / "index.html").read_text(encoding="utf-8")
    assert "<script>" not in page.text and "style=" not in page.text  # which the content security policy would block
    for path in sorted(STATIC.iterdir()):
        found = client.get(f"/static/{path.name}", headers={"Authorization": ""})
        assert found.content == path.read_bytes(), path


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/nothing", "/nothing", "/api/runs/x/config"])
def test_every_answer_has_the_security_headers(client, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        found = client.get(path, headers=headers).headers
        policy = found["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert found["x-content-type-options"] == "nosniff" and found["referrer-policy"] == "no-referrer"
        assert found["cross-origin-resource-policy"] == "same-origin" and found["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in found


@pytest.mark.parametrize(
    "given", [None, "Bearer wrong", "Bearer x y", "Basic x", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]
)
def test_nothing_is_served_without_the_token(client, given):
    headers = {"Authorization": given} if given else {"Authorization": ""}
    for path in ("/api/runs", "/api/changes", "/api/runs/one/config", "/api/runs/one/trajectory/x/0"):
        answer = client.get(path, headers=headers)
        assert (answer.status_code, list(answer.json())) == (401, ["error"])


def test_the_printed_url_sets_a_cookie_that_opens_the_rest(client):
    with httpx.Client(base_url=client.base_url) as browser:
        assert browser.get("/?token=wrong-token-of-nobody").status_code == 401
        answer = browser.get(f"/?token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and str(client.base_url.port) in cookie
        assert browser.get("/api/runs").status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading(client, method):
    assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "127.0.0.1@evil.example", "",
        "[::2]", "[", "0.0.0.0",
    ],
)  # fmt: skip
def test_a_foreign_host_name_is_refused(client, host):
    """DNS rebinding: the page of another site sends requests under its own host name."""
    answer = raw(client, ["GET /api/runs HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {TOKEN}"])
    assert answer.startswith(("HTTP/1.1 403", "HTTP/1.1 400")), answer
    assert '"runs"' not in answer


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "127.0.0.2:80", "[::1]:80", "LOCALHOST:1"])
def test_names_of_this_machine_are_answered(client, host):
    """The port may differ, since it may be forwarded."""
    answer = raw(client, ["GET /api/runs HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {TOKEN}"])
    assert answer.startswith("HTTP/1.1 200")


def test_other_sites_are_refused(client):
    own = f"http://{client.base_url.host}:{client.base_url.port}"
    assert client.get("/api/runs", headers={"Origin": own}).status_code == 200
    for origin in ("http://evil.example", "null", own + "1", "http://127.0.0.1", "http://[", ""):
        assert client.get("/api/runs", headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static/..%5cserver.py",
        "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/.", "/static/", "/static/index.html%00.js",
        "/api/runs/../../etc/passwd", "/api/runs/..%2f..%2f/config", "/api/runs/one/trajectory/..%2f..%2fconfig/0",
        "/api/runs/one/trajectory/%2fetc%2fpasswd/0", "/api/runs/one/trajectory/../config.yaml/0", "/../../etc/passwd",
        "//evil.example/?token=x", "/api/runs/one/%2e%2e", "/config.yaml", "/static/__init__.py",
    ],
)  # fmt: skip
def test_no_path_leads_out(client, path):
    answer = raw(client, [f"GET {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKEN}"])
    assert answer.startswith(("HTTP/1.1 404", "HTTP/1.1 400")), answer
    assert "root:" not in answer and "import " not in answer and "max_steps" not in answer


def test_all_routes_answer(client):
    (run,) = client.get("/api/runs").json()["runs"]
    for what in (
        "config",
        "metrics",
        "timeline",
        "rows",
        "alarms",
        "files",
        "trajectories",
        "groups",
        "facets",
        "search?q=apple",
    ):
        answer = client.get(f"/api/runs/{run['id']}/{what}")
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json", what
    item = client.get(f"/api/runs/{run['id']}/trajectories?limit=1").json()["items"][0]
    found = client.get(f"/api/runs/{run['id']}/trajectory/{item['file']}/{item['line']}").json()
    assert found["summary"] == item
    assert client.get(f"/api/runs/{run['id']}/trajectories?colour=red").status_code == 400
    assert client.get("/api/runs/nobody/config").status_code == 404
    assert client.get("/api/runs/nobody/metrics").status_code == 404
    assert client.head("/api/runs").status_code == 200


def test_curves_are_sent_once(client):
    first = client.get("/api/runs/one/metrics")
    again = client.get("/api/runs/one/metrics", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_hostile_run_is_only_text(tmp_path):
    """Answers are JSON for any content of a run, and the content is only in strings."""
    path = make_run(tmp_path / "<img src=x onerror=alert(1)>", name=HOSTILE, config={HOSTILE: HOSTILE})
    made = make_trajectory(
        HOSTILE, HOSTILE, turns=[make_turn(text=HOSTILE, observed="\ud800 half", components={HOSTILE: 1.0})]
    )
    write_groups(path / "trajectories", "train", 9, [Group(HOSTILE, {}, [made])])
    (path / "trajectories" / "<b>&'\"%2f .jsonl").write_bytes(b"\xff\x00\n" + to_json(make_trajectory()).encode())
    (path / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1.0, "nan": float("nan")}) + "\nhalf")
    (path / "summary.json").write_text(json.dumps({"name": HOSTILE, "steps": HOSTILE}))
    (path / "alarms.jsonl").write_text(json.dumps({"title": HOSTILE}) + "\n[]\n")
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "tokenizer.json").write_text("{}")
    with viewing(path) as client:
        (run,) = client.get("/api/runs").json()["runs"]
        assert run["name"] == HOSTILE
        base = f"/api/runs/{quote(run['id'], safe='')}"
        deadline = time.monotonic() + 60
        while client.get(f"{base}/trajectories").json()["total"] < 60 + 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for what in ("config", "metrics", "timeline", "alarms", "files", "groups", "facets"):
            assert client.get(f"{base}/{what}").status_code == 200, what
        (item,) = client.get(f"{base}/trajectories", params={"task": HOSTILE}).json()["items"]
        found = client.get(f"{base}/trajectory/{item['file']}/{item['line']}").json()
        assert found["turns"][0]["action"]["text"] == HOSTILE and found["tokens"] == "ids"
        odd = next(f for f in client.get(f"{base}/files").json()["files"] if f["kind"].startswith("<b>"))
        assert (odd["count"], odd["unreadable"]) == (2, 1)
        found = client.get(f"{base}/trajectory/{quote(odd['file'], safe='')}/1").json()
        assert found["summary"]["file"] == odd["file"] and len(found["turns"]) == 2
        problems = client.get("/api/runs").json()["runs"][0]["problems"]
        assert any("tokenizer" in p for p in problems) and any("alarms.jsonl" in p for p in problems)


def test_a_running_run_is_updated_within_seconds(tmp_path):
    path = make_run(tmp_path / "one", steps=1)
    with viewing(path) as client:
        state = client.get("/api/changes").json()["state"]

        def seen(holds, what):
            deadline = time.monotonic() + 60
            while True:
                answer = client.get("/api/changes").json()
                if answer["state"] != state and holds(answer["runs"][0]):
                    return answer
                assert time.monotonic() < deadline, what
                time.sleep(0.1)

        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "rollout/reward/mean": 0.75}\n')
        answer = seen(lambda run: run["step"] == 2, "the row")
        state, size = answer["state"], answer["runs"][0]["indexing"]["total"]
        newer = client.get("/api/runs/one/metrics?since=1").json()
        assert newer["columns"]["rollout/reward/mean"] == {"steps": [2], "values": [0.75]}
        write_groups(path / "trajectories", "train", 2, [Group("g", {}, [make_trajectory("new")])])
        state = seen(lambda run: size < run["indexing"]["total"] == run["indexing"]["done"], "the file")["state"]
        assert client.get("/api/runs/one/trajectories?task=new").json()["total"] == 1
        (path / "status.txt").write_text("finished\n")
        seen(lambda run: run["status"] == "finished", "the end")


def test_a_run_of_5000_trajectories_is_answered_from_its_first_page_to_its_last(tmp_path):
    path = make_run(tmp_path / "long", steps=0)
    line = to_json(make_trajectory("common"))
    for step in range(1, 51):
        lines = [line.replace('"common"', f'"task-{n % 7}"') for n in range(100)]
        (path / "trajectories" / f"train_step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    with viewing(path) as client:
        deadline = time.monotonic() + 300
        while client.get("/api/runs/long/trajectories").json()["total"] < 5000:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        pages = [
            client.get("/api/runs/long/trajectories", params={"offset": offset, "limit": 500}).json()["items"]
            for offset in range(0, 5000, 500)
        ]
        places = [(item["step"], item["line"]) for item in itertools.chain.from_iterable(pages)]
        assert places == [(step, line) for step in range(50, 0, -1) for line in range(100)]
        assert client.get("/api/runs/long/facets").json()["tasks"][0]["count"] == 750


# The program


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{run}/nothing"], "does not exist; give the folder of a run"),
        (["{run}/config.yaml"], "is no folder; give the folder of a run"),
        (["{run}/trajectories"], "holds no run"),
        (["{run}", "--host", "0.0.0.0"], "--host 0.0.0.0 is open to others; set MTRL_VIEW_TOKEN"),
        (["{run}", "--port", "99999"], "--port 99999 does not exist"),
        (["{run}", "--max-trajectories", "5"], "--max-trajectories applies only to an exported file; add --export"),
        (["{run}", "--export", "x.html", "--port", "80"], "--export writes a file and serves nothing"),
        (["{run}", "--export", "x.html", "--max-trajectories", "-1"], "--max-trajectories -1 must be at least 0"),
        (["{run}", "--export", "{run}/no/where.html"], "is no folder; make it, or name another file"),
        (["{run}", "--export", "{run}"], "is a folder; name a file in it"),
        (["{run}", "--export", "s3://bucket/x.html"], "--export s3:/bucket/x.html is an address"),
    ],
)
def test_wrong_commands_are_one_sentence(made_run, monkeypatch, words, sentence):
    from mtrl.errors import UserError

    monkeypatch.delenv("MTRL_VIEW_TOKEN", raising=False)
    with pytest.raises(UserError, match=sentence) as error:
        main([word.format(run=made_run) for word in words])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("token", ["short", "x" * 20 + ";", "é" * 20, "a b" * 10, "x" * 20 + "\n"])
def test_tokens_that_could_be_guessed_or_break_a_header(made_run, monkeypatch, token):
    from mtrl.errors import UserError

    monkeypatch.setenv("MTRL_VIEW_TOKEN", token)
    with pytest.raises(UserError, match="must have at least 16 letters, digits, - or _"):
        main([str(made_run), "--no-browser"])


def start(*words, **environment):
    command = [sys.executable, "-m", "mtrl.view", *map(str, words)]
    return forked.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def test_the_server_creates_a_token_and_ends_by_ctrl_c(made_run):
    process = start(made_run, "--no-browser", MTRL_VIEW_TOKEN="")
    url = process.stdout.readline().strip().split(" at ")[1]
    assert len(url.partition("token=")[2]) >= 32
    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(url).status_code == 200
        assert browser.get(httpx.URL(url).join("/api/runs")).status_code == 200
    assert httpx.get(httpx.URL(url).join("/api/runs")).status_code == 401
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), out


def test_an_open_address_needs_the_token_and_takes_any_name(made_run):
    process = start(made_run, "--no-browser", "--host", "0.0.0.0", MTRL_VIEW_TOKEN=TOKEN)
    try:
        port = int(process.stdout.readline().rpartition(":")[2].partition("/")[0])
        headers = {"Host": "trainer.example", "Authorization": f"Bearer {TOKEN}"}
        url = f"http://127.0.0.1:{port}/api/runs"
        assert httpx.get(url, headers=headers).status_code == 200
        assert httpx.get(url, headers={"Host": "trainer.example"}).status_code == 401
    finally:
        process.terminate()
        process.communicate(timeout=120)


def test_half_sent_requests_do_not_block_others(made_run):
    process = start(made_run, "--no-browser", MTRL_VIEW_TOKEN=TOKEN)
    held = []
    try:
        address = ("127.0.0.1", int(process.stdout.readline().rpartition(":")[2].partition("/")[0]))
        for _ in range(600):
            held.append(socket.create_connection(address, timeout=30))
            held[-1].sendall(b"GET /api/runs HTTP/1.1\r\nHost: 127")
        url = f"http://127.0.0.1:{address[1]}/api/runs"
        answers = [httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}).status_code for _ in range(3)]
        assert answers == [200, 200, 200]
    finally:
        for connection in held:
            connection.close()
        process.terminate()
        process.communicate(timeout=120)


def test_a_port_that_is_taken_is_one_sentence(made_run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(made_run, "--no-browser", "--port", taken.getsockname()[1])
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "is not available" in err


@pytest.mark.slow
def test_the_benchmark_adds_up(tmp_path):
    """The benchmark measures every route; the test does not check the times."""
    words = ["--trajectories", "300", "--turns", "2", "--tokens", "5", "--repeats", "2", "--json", "out.json"]
    command = [sys.executable, str(ROOT / "benchmarks" / "viewer.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["files"] == 3
    for opened in (result["with"], result["after"]):
        assert opened["rows in it"] == 300
        assert 0 < opened["page"] <= opened["runs"] <= opened["first list"] <= opened["all lists"]
    assert result["search"]["nowhere at all"]["found"] == 0
    assert "300 trajectories of 2 turns with 5 tokens" in done.stdout
