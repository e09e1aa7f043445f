"""`dspark`: one command line, a subcommand per file of this package."""

import argparse
import importlib
import os
import sys

from common.config import EXIT_BAD_SETTINGS
from common.errors import DsparkError

COMMANDS = ("generate", "detect", "demo")  # modules of this package


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the subcommand; 2 for anything it could not start with."""
    parser = argparse.ArgumentParser(
        prog="dspark", description="Speculative decoding split into two services."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    argv = sys.argv[1:] if argv is None else argv
    # Only the command asked for is imported: `detect` must not wait for grpc.
    for command in [name for name in COMMANDS if name in argv[:1]] or COMMANDS:
        importlib.import_module(f"common.cli.{command}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        code = int(args.func(args))
        sys.stdout.flush()
        return code
    except DsparkError as error:
        print(f"dspark: {' '.join(error.message.split())}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except KeyboardInterrupt:
        return 130  # the shell's code for death by SIGINT
    except BrokenPipeError:  # whoever read us has seen enough: `dspark detect PATH | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        return 141  # the shell's code for death by SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
