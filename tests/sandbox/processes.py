"""Helpers that run Python in a sandbox, and that find processes of the host by their command line."""

from pathlib import Path


def python(sandbox, code, *arguments, **options):
    """Run Python code in the sandbox."""
    return sandbox.run(["python3", "-c", code, *map(str, arguments)], **options)


def processes_with(marker):
    """Return the ids of the host processes whose command line contains the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # the process has ended
            pass
    return found
