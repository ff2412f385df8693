"""Entry point `python -m mtrl.entrypoints.main_base` of the Multi-Turn Training Guide; it is `mtrl train`."""

from mtrl.main import cli

if __name__ == "__main__":
    cli()
