"""Files of lines that other processes append to and cut."""

from types import SimpleNamespace

from mtrl.record.growing import GrowingFile


class CutFile:
    """An open file that another process cuts after the first read."""

    def __init__(self, path, mode):
        self.path, self._file = path, path.open(mode)
        self.seek = self._file.seek

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def read(self, *size):
        found = self._file.read(*size)
        self.path.write_bytes(b"1\n4\n")
        return found


def test_a_file_that_is_cut_during_a_read_is_read_again(tmp_path):
    """A resumed run cuts its files. The removed lines stayed until the file grew."""
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2\n3\n")
    growing = GrowingFile(path)
    assert growing.new_lines() == (True, [(1, b"1\n"), (2, b"2\n"), (3, b"3\n")])
    growing.path = SimpleNamespace(open=lambda mode: CutFile(path, mode))
    assert growing.new_lines() == (False, [])
    growing.path = path
    assert growing.new_lines() == (True, [(1, b"1\n"), (2, b"4\n")])
