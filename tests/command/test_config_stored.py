"""The stored configuration of a run, as another program reads it."""

from mtrl.command.checks import check
from mtrl.command.stored import of_run
from mtrl.record.run_dir import RunDir


def test_one_process_reads_the_configuration_of_many_ranks(tmp_path, monkeypatch):
    """An evaluation needs no ranks, so that the settings for their number are those of one process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    stored = "name: gsm8k\ntrainer:\n  sequence_parallel: 2\n  threads: 3\n  fsdp: {replicas: 2, timeout: 9.0}\n"
    stored += "  tensor_parallel: 2\n  expert_parallel: 4\n"
    RunDir(tmp_path).config.write_text(stored)
    cfg = of_run(tmp_path, [])
    assert (cfg.trainer.sequence_parallel, cfg.trainer.fsdp.replicas) == (1, 1)
    assert (cfg.trainer.tensor_parallel, cfg.trainer.expert_parallel) == (1, 1)
    assert (cfg.trainer.threads, cfg.trainer.fsdp.timeout) == (3, 9.0)
    check(cfg)
