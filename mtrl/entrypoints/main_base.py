"""`python -m mtrl.entrypoints.main_base`, as the Multi-Turn Training Guide writes it, is `python -m mtrl.main`."""

from mtrl.main import cli

if __name__ == "__main__":
    cli()
