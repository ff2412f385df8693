"""Entry point: `python -m mtrl` is the same command as `python -m mtrl.main`."""

from mtrl.main import cli

if __name__ == "__main__":
    cli()
