"""V4 in the verifier's whole engine, with a cache that keeps rows of recent positions only."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.models.deepseek_v4.loading import load_deepseek_v4
from common.models.deepseek_v4.model import DeepseekV4Target
from common.models.interfaces import Target
from common.models.ranks import follow_target
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.parallel import Parallel
from common.tensors import from_bytes
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.no_text import NoText
from common.testing.ranks import run_ranks
from verifier_svc.admission import Admission, Ask, Limits
from verifier_svc.drafting import Draft, Drafter, Drafts, FeatureSource, NoDrafter
from verifier_svc.engine import Engine
from verifier_svc.features import FeatureStore
from verifier_svc.kv_blocks import KVBlocks
from verifier_svc.request import Plan, Request
from verifier_svc.runner import Runner
from verifier_svc.scheduler import Scheduler, SchedulerLimits
from verifier_svc.verify_len import VerifyLength

WINDOW, KV_BLOCK, MAX_DRAFTS, TAPS = 8, 16, 5, (2, 3, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4Target:
    torch.set_num_threads(1)
    folder: Path = tiny_deepseek_v4(tmp_path_factory.mktemp("v4"), compress_rate_hca=KV_BLOCK)
    return load_deepseek_v4(folder, torch.float32)[0]


def taps_of(model: DeepseekV4Target, token_ids: list[int]) -> Tensor:
    """Feature rows of one whole request, in one forward."""
    length = len(token_ids)
    kv, table = model.new_kv(-(-length // KV_BLOCK), KV_BLOCK), range(-(-length // KV_BLOCK))
    slots, positions = torch.tensor(kv.slots_of(table, 0, length)), torch.arange(length)
    batch = AttentionBatch([Segment(0, length, length, table)], slots, positions)
    taps = model.forward(torch.tensor(token_ids), kv, batch, TAPS)[1]
    assert taps is not None
    return taps


class KnowsTheAnswer(NoDrafter):
    """Drafts the right tokens, if it `errs` up to a random place; notes what rows it reads."""

    def __init__(self, answers: dict[str, list[int]], *, errs: bool = True) -> None:
        self.answers, self.random, self.errs = answers, random.Random(4), errs
        self.seen: list[tuple[str, int, int, bytes]] = []  # request id, rows [start, stop)

    def propose(self, plan: Plan, features: FeatureSource) -> Drafts:
        drafts = Drafts()
        for entry in plan.entries:
            request, stop = entry.request, entry.start
            start = max(0, stop - WINDOW)
            if not entry.max_drafts:
                continue
            rows = features.read([(request, start, stop)])
            self.seen.append((request.request_id, start, stop, rows))
            right = self.answers[request.request_id][stop + 1 :][: entry.max_drafts]
            wrong_at = self.random.randint(0, MAX_DRAFTS) if self.errs else MAX_DRAFTS
            tokens = [t if i < wrong_at else (t + 1) % 90 for i, t in enumerate(right)]
            if tokens:
                drafts.by_session[request.session_id] = Draft(tuple(tokens))
        return drafts

    def release(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass


def run(
    model: Target,
    prompts: list[list[int]],
    *,
    num_blocks: int,
    max_running: int,
    drafter: Drafter | None = None,
    bounded: bool = True,
    max_tokens: int = 60,
) -> tuple[list[Request], Scheduler]:
    """All prompts to `max_tokens` new tokens each."""
    drafter = drafter or NoDrafter()
    max_batch_tokens = 6 * max_running
    recent = model.num_recent_blocks(KV_BLOCK, max_running, max_batch_tokens) if bounded else None
    kv = model.new_kv(num_blocks, KV_BLOCK, recent)
    features = FeatureStore(kv, len(TAPS) * model.config.hidden_size, dtype="fp32")
    scheduler = Scheduler(
        KVBlocks(num_blocks, KV_BLOCK, kv.release),
        SchedulerLimits(max_running, max_batch_tokens, MAX_DRAFTS),
        lambda _: NoText(),
        drafter.release,
    )
    runner = Runner(model, kv, features, TAPS)
    engine = Engine(scheduler, runner, drafter, VerifyLength(), lambda _: None)
    admission = Admission(Limits(model.config.vocab_size, 16 * num_blocks, frozenset()))
    requests = [
        admission.admit(
            Ask(f"r{i}", prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        engine.step()
    if recent is not None and recent < num_blocks:
        # All room for recent rows was given back: it holds as many blocks of another request.
        length = recent * KV_BLOCK
        kv.prepare([Segment(0, length, length, range(num_blocks - recent, num_blocks))])
    return requests, scheduler


def test_requests_in_step_fit_the_recent_blocks(model: DeepseekV4Target) -> None:
    """All of them cross every block border at once, six rows each: the most room ever needed."""
    prompts = [[(7 * i + k) % 90 for k in range(6)] for i in range(4)]
    truth, _ = run(model, prompts, num_blocks=64, max_running=1, bounded=False)
    drafter = KnowsTheAnswer({r.request_id: r.token_ids for r in truth}, errs=False)
    got, _ = run(model, prompts, num_blocks=64, max_running=4, drafter=drafter)
    assert [r.token_ids for r in got] == [r.token_ids for r in truth]
    assert all(r.counters.num_accepted_tokens == r.counters.num_draft_tokens > 40 for r in got)


def test_preempted_and_rejected_rows_change_nothing(model: DeepseekV4Target) -> None:
    prompts = [[(11 * i + 5 * k) % 90 for k in range(n)] for i, n in enumerate((3, 50, 9, 33, 70))]
    truth, _ = run(model, prompts, num_blocks=64, max_running=1, bounded=False)
    answers = {r.request_id: r.token_ids for r in truth}
    drafter = KnowsTheAnswer(answers)
    got, scheduler = run(model, prompts, num_blocks=14, max_running=4, drafter=drafter)
    assert scheduler.num_preemptions > 0
    assert [r.token_ids for r in got] == [r.token_ids for r in truth]
    counters = [r.counters for r in got]
    accepted = sum(c.num_accepted_tokens for c in counters)
    assert 0 < accepted < sum(c.num_draft_tokens for c in counters)
    rows = {name: taps_of(model, ids) for name, ids in answers.items()}
    for name, start, stop, data in drafter.seen:
        read = from_bytes(data, "fp32", (stop - start, rows[name].shape[1]))
        assert torch.allclose(read, rows[name][start:stop], atol=1e-4), (name, start, stop)


@pytest.mark.parametrize(("num_ranks", "max_tokens", "num_blocks"), [(2, 60, 10), (4, 12, 8)])
def test_ids_from_several_ranks_are_those_of_one(
    tmp_path: Path, num_ranks: int, max_tokens: int, num_blocks: int
) -> None:
    """With drafts kept and rejected; the longer run also with requests preempted, and on every rank
    no more room for recent rows (8 blocks of 10) than must do.
    """
    tiny_deepseek_v4(tmp_path, "pro", compress_rate_hca=KV_BLOCK, n_routed_experts=10)
    prompts = [[(11 * i + 5 * k) % 90 for k in range(n)] for i, n in enumerate((50, 70, 3, 9))]
    alone, _ = load_target(tmp_path, torch.float32)
    lone: dict[str, int] = {"num_blocks": 64, "max_running": 1, "max_tokens": max_tokens}
    truth, _ = run(alone, prompts, bounded=False, **lone)
    answers = {r.request_id: r.token_ids for r in truth}
    crowd: dict[str, int] = {"num_blocks": num_blocks, "max_running": 2, "max_tokens": max_tokens}

    def work(parallel: Parallel) -> tuple[list[Request], Scheduler] | None:
        model, _ = load_target(tmp_path, torch.float32, parallel=parallel)
        if parallel.rank:
            follow_target(model, parallel)
            return None
        done = run(model, prompts, drafter=KnowsTheAnswer(answers), **crowd)
        parallel.stop()
        return done

    done = run_ranks(num_ranks, work)[0]
    assert done is not None
    got, scheduler = done
    assert [r.token_ids for r in got] == [r.token_ids for r in truth]
    counters = [r.counters for r in got]
    accepted = sum(c.num_accepted_tokens for c in counters)
    assert 0 < accepted < sum(c.num_draft_tokens for c in counters)
    assert scheduler.num_preemptions > 0 or max_tokens < 60
