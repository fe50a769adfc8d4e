"""Entry point of the `torchsparsekv` command. The commands are in torchsparsekv/commands, one file each."""
import sys


def main() -> None:
    try:
        from torchsparsekv.commands import load
    except ModuleNotFoundError as e:
        if e.name != "typer":
            raise
        print("the command line needs typer: pip install 'torchsparsekv[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    load()()


if __name__ == "__main__":
    main()
