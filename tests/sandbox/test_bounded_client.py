"""A client is limited in time and output, and no shell reads its arguments."""

from mtrl.sandbox import bounded_client
from mtrl.sandbox.bounded_client import OUTPUT_BYTES, run_bounded


def test_a_client_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(bounded_client, "SLACK_SECONDS", 0.5)
    result = run_bounded(["bash", "-c", "echo begun; sleep 100 & sleep 100"], 0.5)
    assert result.output == "begun\n" and result.exit_code == -1 and "more than 0.5 s" in result.stopped
    result = run_bounded(["bash", "-c", "head -c 3000000 /dev/zero; sleep 100"], 60)
    assert len(result.output) == OUTPUT_BYTES and "printed more than" in result.stopped


def test_arguments_and_input_arrive_unchanged():
    result = run_bounded(["bash", "-c", 'printf "%s|" "$1"; cat', "name", "$(id) 'x'"], 20, stdin=b"in\xff")
    assert (result.output, result.exit_code, result.stopped) == ("$(id) 'x'|in�", 0, "")
