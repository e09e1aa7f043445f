"""`dspark demo`: both services on this machine, one streamed answer, then the measured difference.

Starts and ends its own processes; everything it prints comes from the services' own counters or
from clocks in this process. The embedded default pair needs the `demo` extra.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from common.cli.processes import ServiceProcess, exit_on_sigterm
from common.client import Generation, VerifierClient
from common.config import cache_dir
from common.cores import two_shares
from common.loading.chat import ChatTemplate

DEFAULT_PROMPT = (
    "Write a Python function that checks whether a word is a palindrome, then explain it."
)
MEASURED_PROMPTS = (
    "Explain in simple words why the sky is blue.",
    "Write a Python function that returns the sum of all even numbers in a list.",
    "A shop sells pens at 3 dollars each. How much do 7 pens cost? Explain step by step.",
)
# Verifying a draft costs about 4 % of a round here; one that is hardly ever reached and kept brings
# in less. Costs 0.005 tokens a round, gains 1 to 2 % of speed.
MIN_SURVIVAL = "0.05"
DRAFTED = "black on green"  # accepted drafts, as the demo shows them

Prompt = str | Sequence[int]  # text, or token ids


@dataclass(frozen=True)
class Subject:
    """What the demo runs, and on which prompts."""

    target: Path
    drafter: Path
    question: str  # as the user sees the first prompt
    first: Prompt
    measured: list[Prompt]


@dataclass(frozen=True)
class Report:
    """What `--json` prints; rates are over all runs together, as the client saw them."""

    drafted_tokens_per_s: float
    plain_tokens_per_s: float
    speedup: float
    acceptance_length: float  # tokens per round, bonus counted
    acceptance_by_position: list[float]  # [i]: share of drafted rounds that accepted draft i + 1
    ids_equal: bool  # temperature 0, drafted against plain, batch-invariant verifier
    num_draft_tokens: int
    num_accepted_tokens: int
    round_ms: dict[str, float]  # mean decode round with drafting, by part


def add_parser(subparsers: Any) -> None:
    """Registers `dspark demo`."""
    parser = subparsers.add_parser("demo", help="run both services here and measure the difference")
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT)
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        default="llama",
        help="llama: a small real model; deepseek-v4: a tiny random checkpoint in the official "
        "quantised layout, on token-id prompts",
    )
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--runs", type=int, default=5, help="measured runs per mode (default 5)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when drafted and plain ids differ."""
    exit_on_sigterm()
    console = Console(stderr=args.json)
    with tempfile.TemporaryDirectory(prefix="dspark-demo-") as folder, ExitStack() as stack:
        subject = FAMILIES[args.family](console, args.prompt, Path(folder))
        console.print("starting the drafter and the verifier ...", style="dim")
        pair = DemoPair(subject.target, subject.drafter, Path(folder))
        stack.enter_context(pair.drafter())
        with pair.verifier() as client:
            _show_stream(console, client, subject.question, subject.first, args.max_tokens)
            plain, drafted = measure(client, subject.measured, args.runs, args.max_tokens)
        with pair.verifier("--batch-invariant") as client:
            equal = ids_equal(client, [subject.first, *subject.measured], args.max_tokens)
    report = summarise(plain, drafted, equal)
    _show_report(console, report)
    if args.json:
        print(json.dumps(asdict(report)))
    return 0 if equal else 1


def embedded_subject(console: Console, prompt: str, folder: Path) -> Subject:
    """The default pair, chatting."""
    target, drafter = embedded_pair(console)
    chat = ChatTemplate(target)

    def render(text: str) -> str:
        return chat.render([{"role": "user", "content": text}])

    return Subject(target, drafter, prompt, render(prompt), [*map(render, MEASURED_PROMPTS)])


def tiny_v4_subject(console: Console, prompt: str, folder: Path) -> Subject:
    """Target and drafter in one checkpoint, written into `folder`; its answers mean nothing."""
    from common.testing.deepseek_v4 import tiny_deepseek_v4  # imports torch

    made = tiny_deepseek_v4(folder / "deepseek-v4", compress_rate_hca=16, noise=0.2)
    prompts = [[seed * i % 90 for i in range(40 * seed)] for seed in (1, 3, 7)]
    return Subject(made, made, f"{len(prompts[0])} token ids", prompts[0], [*prompts[1:]])


FAMILIES = {"llama": embedded_subject, "deepseek-v4": tiny_v4_subject}


def embedded_pair(console: Console) -> tuple[Path, Path]:
    """(target folder, drafter folder); converts the target into the user's cache once."""
    from common.loading.gguf_convert import default_target  # imports torch

    with Progress(
        TextColumn("converting the default model (once)"),
        BarColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None, visible=False)

        def progress(done: int, total: int, _name: str) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        target = default_target(cache_dir(), progress)
    # Data lookup by package name only: common code imports no service.
    spec = importlib.util.find_spec("drafter_svc")
    assert spec is not None and spec.origin is not None
    return target, Path(spec.origin).parent / "drafters" / "smollm2-135m"


class DemoPair:
    """Starts the two services of the demo on Unix sockets in one folder, each with one thread and
    its own half of the cores.
    """

    def __init__(self, target: Path, drafter: Path, folder: Path) -> None:
        self.target, self.draft_model, self.folder = target, drafter, folder
        self._verifier_cores, self._drafter_cores = two_shares()

    def drafter(self) -> ServiceProcess:
        """The drafter process, ready."""
        flags = ["--model", str(self.draft_model), "--target-model", str(self.target)]
        return self._start("drafter_svc", flags, self._drafter_cores)

    @contextmanager
    def verifier(self, *flags: str) -> Iterator[VerifierClient]:
        """A verifier process with `flags`, ready, and a client of it; ended with the block."""
        sts = self.draft_model / "sts.json"
        own = ["--model", str(self.target), "--draft-model", str(self.draft_model)]
        own += ["--drafter", f"unix:{self.folder}/drafter_svc.sock"]
        own += ["--sts", str(sts), "--min-survival", MIN_SURVIVAL] if sts.exists() else []
        with self._start("verifier_svc", [*own, *flags], self._verifier_cores) as process:
            client = VerifierClient(process.listen)
            try:
                client.wait_for_drafter()
                yield client
            finally:
                client.close()

    def _start(self, module: str, flags: list[str], cores: str | None) -> ServiceProcess:
        flags = [*flags, "--threads", "1", *([] if cores is None else ["--cores", cores])]
        listen = f"unix:{self.folder}/{module}.sock"
        process = ServiceProcess(module, flags, listen=listen, log=self.folder / f"{module}.log")
        try:
            process.wait_ready()
        except BaseException:
            process.stop()
            raise
        return process


def measure(
    client: VerifierClient, prompts: Sequence[Prompt], num_runs: int, max_tokens: int
) -> tuple[list[Generation], list[Generation]]:
    """(plain, drafted) generations; the modes alternate so that a drifting machine hits both."""
    runs: dict[bool, list[Generation]] = {False: [], True: []}
    for drafting in (False, True):  # warm-up, not counted
        client.generate(prompts[0], temperature=0.0, max_tokens=16, drafting=drafting)
    for index in range(num_runs):
        prompt = prompts[index % len(prompts)]
        for drafting in (False, True):
            runs[drafting].append(
                client.generate(prompt, temperature=0.0, max_tokens=max_tokens, drafting=drafting)
            )
    return runs[False], runs[True]


def ids_equal(client: VerifierClient, prompts: Sequence[Prompt], max_tokens: int) -> bool:
    """Temperature 0: the ids with drafting equal the ids without, and drafts were accepted."""
    accepted = 0
    for prompt in prompts:
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens}
        plain = client.generate(prompt, drafting=False, **options)
        drafted = client.generate(prompt, **options)
        accepted += drafted.finished.speculation.num_accepted_tokens
        if plain.token_ids != drafted.token_ids:
            return False
    return accepted > 0


def acceptance_length(generations: list[Generation]) -> float:
    """Tokens per decode round over all rounds, the bonus counted (DSpark paper's tau)."""
    stats = [g.finished.speculation for g in generations]
    num_rounds = sum(s.num_rounds for s in stats)
    return 1 + sum(s.num_accepted_tokens for s in stats) / max(1, num_rounds)


def tokens_per_s(generations: list[Generation]) -> float:
    """All tokens after each first delta's over all time after it, as the client saw it."""
    tokens = sum(len(g.token_ids) - 1 for g in generations)
    return tokens / sum(g.total_s - g.first_token_s for g in generations)


def summarise(plain: list[Generation], drafted: list[Generation], equal: bool) -> Report:
    """Rates over all, sums of the counters, means of the round's parts."""
    drafted_rate, plain_rate = tokens_per_s(drafted), tokens_per_s(plain)
    stats = [g.finished.speculation for g in drafted]
    num_drafted_rounds = sum(s.num_drafted_rounds for s in stats)
    num_accepted = sum(s.num_accepted_tokens for s in stats)
    width = max((len(s.accepted_by_position) for s in stats), default=0)
    by_position = [
        sum(s.accepted_by_position[i] for s in stats if i < len(s.accepted_by_position))
        for i in range(width)
    ]
    splits = [g.finished.timings.mean_round for g in drafted]
    parts = ("draft_wait_us", "drafter_us", "forward_us", "verify_us", "other_us")
    return Report(
        drafted_tokens_per_s=drafted_rate,
        plain_tokens_per_s=plain_rate,
        speedup=drafted_rate / plain_rate if plain_rate else 0.0,
        acceptance_length=acceptance_length(drafted),
        acceptance_by_position=[n / max(1, num_drafted_rounds) for n in by_position],
        ids_equal=equal,
        num_draft_tokens=sum(s.num_draft_tokens for s in stats),
        num_accepted_tokens=num_accepted,
        round_ms={
            part.removesuffix("_us"): statistics.mean(getattr(s, part) for s in splits) / 1000
            for part in parts
        },
    )


def _show_stream(
    console: Console, client: VerifierClient, question: str, prompt: Prompt, max_tokens: int
) -> None:
    console.print(f"\n[bold]{question}[/bold]   (accepted drafts look [{DRAFTED}]like this[/])\n")
    for response in client.stream(prompt, temperature=0.0, max_tokens=max_tokens):
        kind = response.WhichOneof("event")
        if kind == "delta":
            delta = response.delta
            num_drafted = delta.num_accepted_drafts
            cut = delta.text_ends[num_drafted - 1] if num_drafted else 0
            console.print(delta.text[:cut], style=DRAFTED, end="", markup=False, highlight=False)
            console.print(delta.text[cut:], end="", markup=False, highlight=False)
        elif kind == "finished":
            console.print(response.finished.text, markup=False, highlight=False)


def _show_report(console: Console, report: Report) -> None:
    table = Table(title="\nthe same prompts, the same verifier, one run", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    positions = "  ".join(f"{share:.2f}" for share in report.acceptance_by_position)
    split = "  ".join(f"{part} {ms:.2f}" for part, ms in report.round_ms.items())
    rows = {
        "tokens/s with drafting": f"{report.drafted_tokens_per_s:.1f}",
        "tokens/s without": f"{report.plain_tokens_per_s:.1f}",
        "speed-up": f"{report.speedup:.2f}x",
        "acceptance length (bonus counted)": f"{report.acceptance_length:.2f}",
        "acceptance by position": positions,
        "mean round, ms": split,
        "ids equal to plain decoding": "yes" if report.ids_equal else "NO",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
