"""mtrl evaluate: see `mtrl.evaluation.command`."""

from mtrl.evaluation.command import cli

if __name__ == "__main__":
    cli()
