"""`python -m mtrl` is `python -m mtrl.main`."""

from mtrl.main import cli

if __name__ == "__main__":
    cli()
