"""Entry point: `python -m mtrl` is the same command as `mtrl train`."""

from mtrl.main import cli

if __name__ == "__main__":
    cli()
