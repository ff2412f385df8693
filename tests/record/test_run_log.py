"""run.log: mirrored lines, log records, warnings on the console."""

import logging

from mtrl.console.console import Console
from mtrl.record.run_log import RunLog


def test_mirror_has_no_colour_and_every_line(tmp_path, printed, episode, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = tmp_path / "run.log"
    with RunLog(path) as log:

        def act(console):
            console.step({"step": 1})
            console.evaluation({"val/success/mean": 0.5}, episode)
            console.warning("careful")

        assert "\x1b" in printed(act, mirror=log.line)
    text = path.read_text()
    assert "\x1b" not in text
    assert "zero-adv" in text and "success 50.0%" in text and "<calc>3*4</calc>" in text
    assert "WARNING warning: careful" in text


def test_records_of_mtrl_loggers_reach_the_file_until_closed(tmp_path):
    logger = logging.getLogger("mtrl.trainer")
    handlers = list(logging.getLogger("mtrl").handlers)
    with RunLog(tmp_path / "run.log"):
        logger.info("saved")
        logging.getLogger("elsewhere").warning("not ours")
    logger.info("too late")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert len(lines) == 1 and lines[0].endswith("INFO    saved")
    assert logging.getLogger("mtrl").handlers == handlers


def test_a_warning_is_shown_once_and_filed_once(tmp_path, capsys):
    with RunLog(tmp_path / "run.log") as log:
        console = Console(mirror=log.line)
        log.show_warnings(console.show_warning)
        logging.getLogger("mtrl.rollout").warning("engine restarted\n%s", "traceback")
    assert capsys.readouterr().out == "warning: engine restarted\n"
    text = (tmp_path / "run.log").read_text()
    assert text.count("engine restarted") == 1 and "traceback" in text


def test_resumed_run_appends(tmp_path):
    for text in ("first", "second"):
        with RunLog(tmp_path / "run.log") as log:
            log.line(text)
    assert len((tmp_path / "run.log").read_text().splitlines()) == 2
