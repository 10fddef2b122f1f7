"""`python -m hisparse` is the `hisparse` command."""

from hisparse.cli.main import run

if __name__ == "__main__":
    run()
