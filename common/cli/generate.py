"""`dspark generate`: one prompt to a running verifier, the answer as it comes.

On a terminal, tokens that the drafter proposed and the target accepted stand out.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from rich.console import Console

from common.client import VerifierClient
from common.loading.chat import ChatTemplate

DRAFTED = "black on green"  # accepted drafts
EXIT_FAILED = 1


def add_parser(subparsers: Any) -> None:
    """Registers `dspark generate`."""
    parser = subparsers.add_parser("generate", help="stream an answer from a running verifier")
    add = parser.add_argument
    add("prompt", help="text as it stands; '-' reads standard input")
    add("--address", default="127.0.0.1:50051", help="unix:PATH or HOST:PORT (default %(default)s)")
    add("--temperature", type=float, help="0 is greedy (server's default: 1)")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--seed", type=int)
    add("--max-tokens", type=int, help="default: what the context has room for")
    add("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--coupled", action="store_true", help="text depends on prompt, seed and target only")
    add("--no-drafting", action="store_true", help="decode this request plainly")
    add("--timeout", type=float, metavar="SECONDS", help="the call's deadline")
    add("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    add(
        "--chat-model",
        type=Path,
        metavar="FOLDER",
        help="checkpoint with that template (default: the folder the verifier names)",
    )
    add("--json", action="store_true", help="print one JSON object instead of streaming")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when the verifier ended the call with an error."""
    client = VerifierClient(args.address)
    try:
        return _run(args, client)
    except grpc.RpcError as error:
        print(f"dspark: {error.code().name}: {error.details()}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        client.close()


def _run(args: argparse.Namespace, client: VerifierClient) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.chat:
        template = ChatTemplate(args.chat_model or Path(client.info().model))
        prompt = template.render([{"role": "user", "content": prompt}])
    options = {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "stop": args.stop,
        "coupled": args.coupled,
        "drafting": not args.no_drafting,
        "timeout_s": args.timeout,
    }
    if args.json:
        result = client.generate(prompt, **options)
        answer = {"token_ids": result.token_ids, **_plain(result.finished), "text": result.text}
        print(json.dumps(answer, ensure_ascii=False))
        return 0
    _stream(client, prompt, options)
    return 0


def _stream(client: VerifierClient, prompt: str, options: dict[str, Any]) -> None:
    """Prints text as it comes; on a terminal with colours and a closing line of numbers."""
    out, notes = (
        Console(highlight=False, soft_wrap=True),
        Console(stderr=True, highlight=False, soft_wrap=True),
    )
    started = first = time.perf_counter()
    num_tokens = 0
    for response in client.stream(prompt, **options):
        kind = response.WhichOneof("event")
        if kind == "delta":
            delta, num_drafted = response.delta, response.delta.num_accepted_drafts
            first = first if num_tokens else time.perf_counter()
            num_tokens += len(delta.token_ids)
            cut = delta.text_ends[num_drafted - 1] if num_drafted else 0
            _show(out, delta.text[:cut], DRAFTED)
            _show(out, delta.text[cut:])
        elif kind == "finished":
            _show(out, response.finished.text + "\n")
            if notes.is_terminal:
                _summary(notes, response.finished, first - started, time.perf_counter() - first)


def _show(out: Console, text: str, style: str | None = None) -> None:
    if out.is_terminal:
        out.print(text, style=style, end="", markup=False)
    else:  # exactly the model's text: no wrapping, no tabs expanded
        sys.stdout.write(text)
        sys.stdout.flush()


def _summary(notes: Console, finished: Any, first_s: float, decode_s: float) -> None:
    stats, num_output = finished.speculation, finished.num_output_tokens
    rate = (num_output - 1) / decode_s if num_output > 1 and decode_s > 0 else 0.0
    notes.print(
        f"{num_output} tokens ({_plain(finished)['reason']}), first after {first_s * 1e3:.0f} ms, "
        f"{rate:.1f} tokens/s, {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts "
        "accepted",
        style="dim",
    )


def _plain(message: Message) -> dict[str, Any]:
    """All fields, zeros too; enums by name; numbers stay numbers, unlike in protobuf's JSON."""
    return {f.name: _value(f, getattr(message, f.name)) for f in message.DESCRIPTOR.fields}


def _value(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name.removeprefix("FINISH_REASON_").lower()
    if isinstance(value, Message):
        return _plain(value)
    return value if isinstance(value, str | int | float | bool) else list(value)
