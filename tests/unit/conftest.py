"""Shared by the verifier's unit tests: a whole engine on a tiny model, stepped by hand."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch

from common.loading.tokenizer import StreamDecoder, Tokenizer
from common.models.dense import DenseTarget
from common.models.interfaces import Target
from common.models.registry import load_target
from common.testing.no_text import NoText
from common.testing.tiny import tiny_target
from verifier_svc.admission import Admission, Ask, Limits
from verifier_svc.drafting import Drafter, NoDrafter
from verifier_svc.engine import Engine
from verifier_svc.events import Delta, Event, Failed, Finished
from verifier_svc.features import FeatureStore
from verifier_svc.kv_blocks import KVBlocks
from verifier_svc.request import Request
from verifier_svc.runner import Runner
from verifier_svc.scheduler import Scheduler, SchedulerLimits
from verifier_svc.stopping import TextDecoder
from verifier_svc.verify_len import VerifyLength

torch.set_num_threads(1)


class Rig:
    """One engine whose steps the test runs itself; `run` submits, steps to the end, checks ends."""

    def __init__(
        self,
        model: Target,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        *,
        max_drafts: int = 0,
        num_kv_blocks: int = 256,
        kv_block_size: int = 4,
        max_running: int = 8,
        max_batch_tokens: int = 64,
        taps: tuple[int, ...] = (),
        verify_length: VerifyLength | None = None,
        max_waiting: int = 256,
    ) -> None:
        self.model = model
        self.drafter = drafter or NoDrafter()
        self.events: list[Event] = []
        width = len(taps) * model.config.hidden_size
        recent = model.num_recent_blocks(kv_block_size, max_running, max_batch_tokens)
        kv = model.new_kv(num_kv_blocks, kv_block_size, recent)
        features = FeatureStore(kv, width, dtype="fp32")

        def decoder_for(request: Request) -> TextDecoder:
            return StreamDecoder(tokenizer, request.token_ids) if tokenizer else NoText()

        self.scheduler = Scheduler(
            KVBlocks(num_kv_blocks, kv_block_size, kv.release),
            SchedulerLimits(max_running, max_batch_tokens, max_drafts),
            decoder_for,
            self.drafter.release,
        )
        self.runner = Runner(model, kv, features, taps)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            self.drafter,
            verify_length or VerifyLength(),
            self.events.extend,
            max_waiting,
        )
        config = model.config
        room = min(config.max_context_len, num_kv_blocks * kv_block_size + 1)
        eos = frozenset(config.eos_token_ids)
        self.admission = Admission(Limits(config.vocab_size, room, eos))

    def ask(self, request_id: str, prompt_ids: Sequence[int], **asked: object) -> Request:
        """An admitted request that has not been submitted."""
        return self.admission.admit(Ask(request_id, prompt_ids, **asked))  # type: ignore[arg-type]

    def run(self, requests: Iterable[Request], max_steps: int = 10_000) -> list[Request]:
        """Runs all of them to their end, asserting the rules that every run must keep."""
        requests = list(requests)
        for request in requests:
            self.scheduler.add(request)
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.events += self.engine.step()
            live = [*self.scheduler.running, *self.scheduler.waiting]
            held = [block for request in live for block in request.block_table]
            kv_blocks = self.scheduler.kv_blocks
            assert len(set(held)) == len(held) == kv_blocks.num_blocks - kv_blocks.num_free
        assert not self.scheduler.has_work, f"not finished after {max_steps} steps"
        assert self.scheduler.kv_blocks.num_free == self.scheduler.kv_blocks.num_blocks
        for request in requests:
            self.check_stream(request)
        return requests

    def of(self, request: Request) -> list[Event]:
        """This request's events so far."""
        return [event for event in self.events if event.request_id == request.request_id]

    def finished(self, request: Request) -> Finished:
        """Its last event."""
        last = self.of(request)[-1]
        assert isinstance(last, Finished), last
        return last

    def text(self, request: Request) -> str:
        """All text that its client got."""
        return "".join(e.text for e in self.of(request) if not isinstance(e, Failed))

    def check_stream(self, request: Request) -> None:
        """Deltas add up to the output; exactly one end."""
        events = self.of(request)
        deltas = [event for event in events if isinstance(event, Delta)]
        assert [type(event) for event in events] == [Delta] * len(deltas) + [Finished]
        streamed = [token for delta in deltas for token in delta.token_ids]
        assert streamed == request.token_ids[request.num_prompt :]
        for delta in deltas:
            assert len(delta.text_ends) == len(delta.token_ids) > 0
            assert list(delta.text_ends) == sorted(delta.text_ends)
            assert delta.text_ends[-1] == len(delta.text)


@pytest.fixture(scope="session")
def make_rig() -> Callable[..., Rig]:
    """The class itself: test files cannot import each other."""
    return Rig


@pytest.fixture(scope="session")
def tiny_models(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[DenseTarget, Path]]:
    """`tiny_models(family, **sizes)`: a loaded model (fp32) and its folder, made once per session.

    `numerics="batch_invariant"` loads it in bf16: the dtype in which that matters.
    """
    made: dict[str, tuple[DenseTarget, Path]] = {}

    def get(
        family: str = "llama", numerics: str = "fast", **sizes: object
    ) -> tuple[DenseTarget, Path]:
        key = f"{family}-{numerics}-{sorted(sizes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("target")
            tiny_target(folder, family, **sizes)  # type: ignore[arg-type]
            dtype = torch.float32 if numerics == "fast" else torch.bfloat16
            model, _ = load_target(folder, dtype, numerics=numerics)  # type: ignore[arg-type]
            made[key] = (model, folder)
        return made[key]

    return get
