"""Both real services on a tiny quantised DeepSeek-V4 checkpoint in the official layout."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from common.cli.main import main
from common.cli.processes import ServiceProcess
from common.client import Generation, VerifierClient
from common.errors import StartupError
from common.loading.safetensors_files import read_json
from common.pb.v1 import drafter_pb2, drafter_pb2_grpc
from common.testing.deepseek_v4 import Kind, tiny_deepseek_v4
from common.testing.streams import generate_together

WINDOW, HCA, BLOCK = 8, 16, 5
# Prompts shorter than the window; longer than it; than an HCA group; than a step of 32 rows.
PROMPTS = [[3, 9, 27, 5], list(range(1, 13)), [7] * 20, [i * 5 % 90 for i in range(75)]]
NUM_TOKENS = 160
FLAGS = ["--dtype", "fp32", "--threads", "1"]
ROOM = ["--max-running", "6", "--max-batch-tokens", "32", "--draft-timeout-ms", "5000"]
ROOM += ["--log-format", "json"]


class Pair:
    """A verifier that stays, and a drafter that comes and goes; both read one folder."""

    def __init__(self, folder: Path, kind: Kind = "flash", *more_flags: str) -> None:
        self.folder = folder
        self.checkpoint = tiny_deepseek_v4(folder / "v4", kind, compress_rate_hca=HCA)
        flags = ["--model", str(self.checkpoint), "--draft-model", str(self.checkpoint)]
        flags += ["--drafter", f"unix:{folder}/d.sock", *FLAGS, *ROOM, *more_flags]
        self.verifier = ServiceProcess(
            "verifier_svc", flags, listen=f"unix:{folder}/v.sock", log=folder / "v.log"
        )
        self.drafter = self.start_drafter()
        self.verifier.wait_ready()
        self.client = VerifierClient(self.verifier.listen)

    def start_drafter(self) -> ServiceProcess:
        """Another drafter process on the same socket, ready."""
        flags = ["--model", str(self.checkpoint), "--target-model", str(self.checkpoint), *FLAGS]
        self.drafter = ServiceProcess(
            "drafter_svc",
            flags,
            listen=f"unix:{self.folder}/d.sock",
            log=self.folder / "d.log",
        )
        self.drafter.wait_ready()
        return self.drafter

    def kill_drafter(self) -> None:
        """As a crash would."""
        os.kill(self.drafter.process.pid, signal.SIGKILL)
        self.drafter.stop()

    def end(self) -> None:
        """Both processes leave in order."""
        self.client.close()
        self.drafter.stop()
        assert self.verifier.stop() == 0, self.verifier.tail()

    def generate_all(
        self, on_start: Callable[[], None] | None = None, **options: object
    ) -> list[Generation]:
        """All prompts at once; `on_start` runs when every stream is under way."""
        shared = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout_s": 90, **options}
        cases = [(prompt, shared) for prompt in PROMPTS]
        return generate_together(self.client, cases, under_way_after=10, on_start=on_start)

    def drafter_info(self) -> drafter_pb2.GetDrafterInfoResponse:
        """What the drafter says of itself."""
        with grpc.insecure_channel(self.drafter.listen) as channel:
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            return stub.GetInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    """Ids without drafts at temperature 0: the truth for the tests here."""
    generations = pair.generate_all(temperature=0.0, drafting=False)
    assert not any(g.finished.speculation.num_draft_tokens for g in generations)
    return [g.token_ids for g in generations]


def acceptance_length(generations: list[Generation]) -> float:
    """Tokens per round, the bonus counted."""
    stats = [g.finished.speculation for g in generations]
    return 1 + sum(s.num_accepted_tokens for s in stats) / sum(s.num_rounds for s in stats)


def test_four_at_once_equal_plain_decoding(pair: Pair, plain: list[list[int]]) -> None:
    pair.client.wait_for_drafter()
    drafted = pair.generate_all(temperature=0.0)
    assert [g.token_ids for g in drafted] == plain
    assert all(g.finished.speculation.num_accepted_tokens for g in drafted)
    assert acceptance_length(drafted) > 2
    info = pair.client.info()
    assert info.num_free_kv_blocks == info.num_kv_blocks


def test_the_drafter_may_be_killed_and_come_back(pair: Pair, plain: list[list[int]]) -> None:
    """Every stream falls behind by more than a window meanwhile, and is drafted for again."""
    pair.client.wait_for_drafter()

    def crash() -> None:
        pair.kill_drafter()
        pair.start_drafter()

    generations = pair.generate_all(crash, temperature=0.0)
    assert [g.token_ids for g in generations] == plain
    assert all(g.finished.speculation.num_accepted_tokens for g in generations)
    assert any(g.finished.speculation.num_fallback_rounds for g in generations)
    pair.client.wait_for_drafter()
    again = pair.generate_all(temperature=0.0)
    assert [g.token_ids for g in again] == plain and acceptance_length(again) > 2


def test_coupled_sampling_does_not_depend_on_the_drafter(pair: Pair) -> None:
    pair.client.wait_for_drafter()
    wishes = {"temperature": 0.7, "coupled": True, "seed": 11, "max_tokens": 60}
    drafted = pair.generate_all(**wishes)
    alone = pair.generate_all(drafting=False, **wishes)
    assert [g.token_ids for g in drafted] == [g.token_ids for g in alone]
    assert acceptance_length(drafted) > 1.5


def test_every_tensor_is_accounted_for(pair: Pair) -> None:
    weights = read_json(pair.checkpoint / "model.safetensors.index.json")["weight_map"]
    num_drafter = sum(name.startswith("mtp.") for name in weights)
    target = json.loads(pair.client.info().load_report_json)
    assert target["num_tensors"] + num_drafter == len(weights) and not target["ignored"]
    assert f"its {num_drafter} tensors do not concern the target" in target["notes"][0]
    drafter = json.loads(pair.drafter_info().load_report_json)
    assert drafter["num_tensors"] == num_drafter + 2  # embedding and head are the target's too
    assert drafter["num_tensors"] + len(drafter["ignored"]) == len(weights)
    assert any("97 parameters" in note for note in drafter["notes"])


def test_old_positions_take_no_window_rows_and_no_feature_rows(pair: Pair) -> None:
    line = next(line for line in pair.verifier.log.read_text().splitlines() if "KV cache" in line)
    cache = json.loads(line)
    assert cache["kv_block_size"] == HCA
    # 6 requests with 4 blocks each, and 2 for the rows of a step.
    assert cache["num_slots"] == (6 * 4 + 2) * HCA < cache["num_blocks"] * HCA
    # All six may be of the full 4096 tokens.
    assert 6 * cache["mib_of_longest_request"] < cache["mib"] < 7 * cache["mib_of_longest_request"]
    contract = pair.drafter_info().contract
    assert contract.context_window == WINDOW and contract.block_size == BLOCK


@pytest.mark.slow
def test_a_pro_like_pair_with_projected_rows(tmp_path: Path) -> None:
    """The verifier runs main_proj and main_norm; a row on the wire is a third as wide."""
    pair = Pair(tmp_path, "pro", "--feature-form", "projected")
    try:
        pair.client.wait_for_drafter()
        alone = pair.generate_all(temperature=0.0, drafting=False)
        drafted = pair.generate_all(temperature=0.0)
        assert [g.token_ids for g in drafted] == [g.token_ids for g in alone]
        assert acceptance_length(drafted) > 2
    finally:
        pair.end()


@pytest.mark.slow
def test_the_demo_measures_a_pair_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["demo", "--family", "deepseek-v4", "--runs", "1", "--max-tokens", "24", "--json"]
    assert main(flags) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["ids_equal"] and report["acceptance_length"] > 1.5


def test_plain_v4_is_served_undrafted_and_says_so(tmp_path: Path) -> None:
    folder = tiny_deepseek_v4(tmp_path / "v4", "pro", drafter="mtp", compress_rate_hca=HCA)
    listen, log = f"unix:{tmp_path}/v.sock", tmp_path / "v.log"
    with ServiceProcess(
        "verifier_svc", ["--model", str(folder), *FLAGS], listen=listen, log=log
    ) as v:
        v.wait_ready()
        client = VerifierClient(listen)
        done = client.generate(PROMPTS[1], temperature=0.0, max_tokens=12, ignore_eos=True)
        client.close()
    assert len(done.token_ids) == 12 and not done.finished.speculation.num_draft_tokens
    assert "classic MTP head, which stays unused" in log.read_text()


def test_an_explicit_mtp_is_refused_before_weights_are_there(pair: Pair, tmp_path: Path) -> None:
    shutil.copy(pair.checkpoint / "config.json", tmp_path)
    flags = ["--model", str(tmp_path), "--method", "mtp", "--num-speculative-tokens", "1"]
    process = ServiceProcess("verifier_svc", flags, listen=f"unix:{tmp_path}/v", log=tmp_path / "l")
    with process, pytest.raises(StartupError, match="exited with 2"):
        process.wait_ready()
    assert 'method="mtp" cannot run on' in process.tail() and "dspark" in process.tail()
