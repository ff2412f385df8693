"""The cases of the healing study compose, and its table shows the results of their three runs."""

import json

import pytest

from experiments.healing import heal
from mtrl.command.compose import compose

CASES = heal.Case.read(heal.HERE / "cases.yaml")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_composes(case, tmp_path):
    for words in ([], case.mended or []):
        assert compose([*case.overrides, *words, f"run_dir={tmp_path}"]).run_dir == str(tmp_path)


@pytest.mark.parametrize(
    ("ill", "control", "healed", "verdict"),
    [(0.0, 0.0, 1.0, "yes"), (0.4, 0.5, 0.65, "no"), (0.4, 0.5, None, "no"), (0.3, 0.5, 0.9, "only took time")],
)
def test_a_run_has_recovered_if_it_is_better_than_its_control(ill, control, healed, verdict):
    assert heal.verdict({"ill": ill, "control": control, "healed": healed}) == verdict


def test_the_page_shows_the_stored_results():
    found = json.loads(heal.RESULTS.read_text())
    assert set(found) == {case.name for case in CASES}
    assert heal.table(CASES, found) in (heal.HERE / "README.md").read_text()
