"""The benchmark of changes of weights trains a model, and its numbers add up. Times are not tested."""

from tests.benchmark_runs import run_benchmark


def test_small_steps_change_few_weights(tmp_path, make_tiny_model, tiny_tokenizer):
    make_tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--steps", "1", "--tokens", "16", "--lr", "1e-7", "1e-3", "--exact"]
    done = run_benchmark(tmp_path, "weight_changes.py", *words)
    assert done.returncode == 0, done.stderr
    rows = [[float(cell) for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines()[3:]]
    (small, large) = rows
    assert small[:2] == [1e-7, 1] and large[:2] == [1e-3, 1]
    assert 0 < small[2] < large[2] and 0 < small[5] < large[5] <= 100  # changed elements, bytes, in percent
