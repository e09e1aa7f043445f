"""`dspark detect PATH`: which drafter a checkpoint carries, and whether the settings can work.

Exit code 0: fine; 1: warnings, with --strict-warnings; 2: refused. Reads config.json and the tensor
index only, imports neither torch nor grpc.
"""

import argparse
import io
import json
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from common.detect.api import resolve
from common.detect.files import detect_checkpoint, read_checkpoint_config
from common.detect.k_rules import POLICIES
from common.detect.padding import Padding, config_padding
from common.detect.refusal import one_line
from common.detect.report import Row, padding_rows, plan_rows, verdict_rows
from common.detect.verdict import Plan, Remark, Verdict
from common.errors import ConfigError

EXIT_FINE, EXIT_WARNINGS, EXIT_REFUSED = 0, 1, 2
_RED, _YELLOW, _DIM, _BOLD = 31, 33, 2, 1
_MAX_TP = 4096


@dataclass
class _Answer:
    """As much as was found out before an error, if any, ended it. Written by `_examine` only."""

    verdict: Verdict | None = None
    draft: Verdict | None = None
    plan: Plan | None = None
    padding: Padding | None = None
    errors: list[ConfigError] = field(default_factory=list)

    def remarks(self, kind: str) -> list[Remark]:
        """The `warnings` or `notes` of all parts, each once; what became an error is left out."""
        parts = [part for part in (self.verdict, self.draft, self.plan) if part is not None]
        ended_as = {error.code for error in self.errors}
        found = (remark for part in parts for remark in getattr(part, kind))
        return [r for r in dict.fromkeys(found) if r.code not in ended_as]


def add_parser(subparsers: Any) -> None:
    """Registers `detect` with the `dspark` command's `subparsers`."""
    parser = subparsers.add_parser(
        "detect", help="say which drafter a checkpoint carries and which settings can work"
    )
    _add_arguments(parser)
    parser.set_defaults(func=run)


def main(argv: list[str] | None = None) -> int:
    """`python -m common.cli.detect`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dspark detect", description=__doc__)
    _add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Examines, prints, and returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths in names this terminal lacks
    answer = _examine(args)
    if args.json:
        print(json.dumps(_as_json(answer, args), indent=2))
    else:
        _print_table(answer, args)
    if answer.errors:
        return EXIT_REFUSED
    return EXIT_WARNINGS if args.strict_warnings and answer.remarks("warnings") else EXIT_FINE


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", help="checkpoint folder, its config.json, or a .safetensors file beside one")
    add("--method", help="speculation method to check; without it the detected one is taken")
    add(
        "--num-speculative-tokens",
        metavar="K",
        type=_number_or_text,
        help="drafts per round; default: as trained",
    )
    add("--draft-model", metavar="PATH", help="a separate draft checkpoint")
    add("--tp", type=_tp, metavar="N", help="also show the shared-expert padding at N ranks")
    add("--k-policy", choices=POLICIES, default="floor", help="how K may differ from the trained")
    add("--strict-warnings", action="store_true", help="exit 1 when there are warnings")
    add("--json", action="store_true", help="one JSON object instead of a table")


def _number_or_text(text: str) -> int | str:
    """An integer where it is one; anything else goes on as it is, to be refused with its reason."""
    return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII) else text


def _tp(text: str) -> int:
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or not 1 <= int(text) <= _MAX_TP:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 1 to {_MAX_TP}")
    return int(text)


def _examine(args: argparse.Namespace) -> _Answer:
    answer = _Answer()
    try:
        answer.verdict = detect_checkpoint(args.path)
        if args.tp is not None:
            answer.padding = config_padding(read_checkpoint_config(args.path), args.tp)
        if args.draft_model is not None:
            answer.draft = detect_checkpoint(args.draft_model)
        answer.plan = resolve(
            answer.verdict, answer.draft, args.method, args.num_speculative_tokens, args.k_policy
        )
    except ConfigError as error:
        answer.errors.append(error)
    return answer


def _as_json(answer: _Answer, args: argparse.Namespace) -> dict[str, Any]:
    """The verdict of PATH with plan, errors and warnings beside its fields.

    Without a verdict `kind` is "none" and the errors say why. `method` and
    `num_speculative_tokens` are null when refused.
    """
    verdict = answer.verdict or Verdict(kind="none", name=args.path)
    plan = answer.plan
    out = verdict.to_json()
    out["method"] = plan.method if plan else None
    out["num_speculative_tokens"] = plan.num_speculative_tokens if plan else None
    out["plan"] = plan.to_json() if plan else None
    out["draft"] = answer.draft.to_json() if answer.draft else None
    out["errors"] = [
        {"code": e.code, "message": e.message, "hints": list(e.hints)} for e in answer.errors
    ]
    for kind in ("warnings", "notes"):
        out[kind] = [{"code": r.code, "message": r.message} for r in answer.remarks(kind)]
    if args.tp is not None:
        out["padding"] = answer.padding.to_json() if answer.padding else None
    return out


def _print_table(answer: _Answer, args: argparse.Namespace) -> None:
    print(_paint(repr(args.path), _BOLD))
    rows: list[Row] = verdict_rows(answer.verdict) if answer.verdict else []
    if answer.draft:
        rows += [(f"draft {label}", text) for label, text in verdict_rows(answer.draft)]
    if args.tp is not None and answer.verdict:
        none = [("shared-expert padding", "none: the config has no shared experts")]
        rows += padding_rows(answer.padding) if answer.padding else none
    if answer.plan:
        rows += plan_rows(answer.plan)
    width = max((len(label) for label, _ in rows), default=0)
    for label, text in rows:
        print(f"  {_paint(label.ljust(width), _DIM)}  {text}")
    for remark in answer.remarks("notes"):
        print(f"  {_paint(f'note {remark.code}', _DIM)}  {one_line(remark.message)}")
    for remark in answer.remarks("warnings"):
        print(f"  {_paint(f'warning {remark.code}', _YELLOW)}  {one_line(remark.message)}")
    for error in answer.errors:
        print(f"  {_paint(f'refused {error.code}', _RED)}  {error.message}")


def _paint(text: str, colour: int) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if sys.stdout.isatty() else text


if __name__ == "__main__":
    sys.exit(main())
