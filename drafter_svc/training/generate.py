"""Step 1 of training: the target answers prompts; texts and its inner states go to shard files.

    python -m drafter_svc.training.generate --target DIR --data DIR [--tokens N] [--minutes M]

Resumable: a new run goes on after the last prompt of the last shard. Training may read shards
meanwhile.
"""

import logging
import random
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from drafter_svc.training.prompts import OPENING, Prompt, chat_prefix, load_words, make_prompt
from drafter_svc.training.settings import Settings, parse_settings
from drafter_svc.training.shards import (
    Text,
    list_shards,
    num_answer_tokens,
    read_meta,
    write_shard,
)
from drafter_svc.training.target import BatchTarget

log = logging.getLogger("dspark.generate")

SHARD_TOKENS = 40_000
RESORT_STEPS = 32  # slots are sorted by length this often, so that attention pads little
LOOP_STEPS = 8  # texts are checked for loops this often
MAX_PERIOD = 48  # longest repeated stretch, in tokens, that counts as a loop
CANDIDATES = 20  # tokens whose logits are recomputed in float32; also the top-k when sampling
GREEDY_SHARE = 0.75
TEMPERATURE, TOP_P = 0.7, 0.8
INVENT_TEMPERATURE, INVENT_TOP_P = 1.0, 0.95
INVENTED_LENS = range(6, 100)  # tokens of an invented user's turn worth answering


@dataclass
class Row:
    """A text being written. `row` is its place in the state buffer, whatever slot its KV is in."""

    prompt: Prompt
    row: int
    ids: list[int]
    prompt_len: int
    temperature: float
    top_p: float
    lse: list[float] = field(default_factory=list)


class Generator:
    """Keeps `num_slots` texts in flight and refills a slot as soon as its text ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = Tokenizer.from_file(str(settings.target / "tokenizer.json"))
        self.end_id = self.tokenizer.token_to_id("<|im_end|>")
        self.max_len = settings.max_prompt + settings.max_new
        self.target = BatchTarget(settings.target, settings.taps, settings.num_slots, self.max_len)
        opening = self.tokenizer.encode(OPENING, add_special_tokens=False).ids
        self.target.remember_prefix(torch.tensor(opening))
        width = (len(settings.taps) + 1) * self.target.d
        shape = (settings.num_slots, self.max_len, width)
        self.states = torch.zeros(shape, dtype=torch.bfloat16)
        self.slots: list[Row] = []
        self.lengths = torch.zeros(settings.num_slots, dtype=torch.long)
        vocabulary = self.tokenizer.get_vocab()
        self.words = load_words(sorted(vocabulary, key=vocabulary.__getitem__))
        self.invented: deque[Prompt] = deque()
        self.seen: set[str] = set()
        shards = list_shards(settings.data)
        self.num_shards = len(shards)
        self.next_prompt = read_meta(shards[-1])["next_prompt"] if shards else 0
        self.finished: list[Text] = []

    def run(self) -> None:
        """Writes shards until the settings' token or time limit is reached."""
        began = noted = time.monotonic()
        self.slots = [self._start(row) for row in range(self.settings.num_slots)]
        steps, done = 0, num_answer_tokens(self.settings.data)
        while True:
            done += self._step()
            steps += 1
            if steps % RESORT_STEPS == 0:
                self._resort()
            if sum(len(text.ids) for text in self.finished) >= SHARD_TOKENS:
                self._write()
            now = time.monotonic()
            if now - noted > 30:
                rate = len(self.slots) * steps / (now - began)
                log.info("%d tokens in %d shards, %.0f tok/s", done, self.num_shards, rate)
                noted = now
            if done >= self.settings.tokens or now - began > self.settings.minutes * 60:
                break
        if self.finished:
            self._write()

    def _write(self) -> None:
        meta = {
            "taps": self.settings.taps,
            "hidden_size": self.target.d,
            "next_prompt": self.next_prompt,
            "target": self.settings.target.name,
        }
        write_shard(self.settings.data, self.num_shards, self.finished, meta)
        self.num_shards += 1
        self.finished = []

    def _next(self) -> tuple[Prompt, list[int]]:
        """The next prompt that is new and short enough, with its token ids."""
        while True:
            if self.invented:
                prompt = self.invented.popleft()
            else:
                prompt = make_prompt(self.next_prompt, self.words)
                self.next_prompt += 1
            if not prompt.invent and prompt.text in self.seen:
                continue
            text = OPENING + prompt.text if prompt.invent else chat_prefix(prompt.text)
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) <= self.settings.max_prompt:
                if not prompt.invent:
                    self.seen.add(prompt.text)
                return prompt, ids

    def _start(self, slot: int, row: int | None = None) -> Row:
        """Prefills a new text into `slot` and draws its first token."""
        prompt, ids = self._next()
        greedy = random.Random(f"greedy-{prompt.index}").random() < GREEDY_SHARE
        if prompt.invent:
            temperature, top_p = INVENT_TEMPERATURE, INVENT_TOP_P
        else:
            temperature, top_p = (0.0, 1.0) if greedy else (TEMPERATURE, TOP_P)
        made = Row(prompt, slot if row is None else row, list(ids), len(ids), temperature, top_p)
        states = self.target.prefill(slot, torch.tensor(ids))
        self.states[made.row, : len(ids)] = states
        self.lengths[slot] = len(ids)
        tokens, lse = self._sample(states[-1:, -self.target.d :], [made])
        made.ids.append(tokens[0])
        made.lse.append(lse[0])
        return made

    def _step(self) -> int:
        """One token for every row; returns the answer tokens of texts that it finished."""
        last = torch.tensor([row.ids[-1] for row in self.slots])
        states = self.target.decode(last, self.lengths)
        self.states[torch.tensor([row.row for row in self.slots]), self.lengths] = states
        self.lengths += 1
        tokens, lse = self._sample(states[:, -self.target.d :], self.slots)
        done = 0
        for slot, row in enumerate(self.slots):
            row.ids.append(tokens[slot])
            row.lse.append(lse[slot])
            if self._ended(row):
                done += self._finish(row)
                self.slots[slot] = self._start(slot, row.row)
        return done

    def _ended(self, row: Row) -> bool:
        num_new = len(row.ids) - row.prompt_len
        if row.ids[-1] == self.end_id or num_new >= self.settings.max_new:
            return True
        if row.prompt.invent and num_new >= INVENTED_LENS.stop:
            return True
        return num_new % LOOP_STEPS == 0 and loops(row.ids[row.prompt_len :])

    def _finish(self, row: Row) -> int:
        if row.prompt.invent:
            self._keep_invented(row)
            return 0
        n = len(row.ids)
        states = self.states[row.row, :n].clone()
        states[n - 1] = 0
        lse = torch.zeros(n)
        lse[row.prompt_len - 1 : n - 1] = torch.tensor(row.lse)
        greedy = row.temperature == 0
        self.finished.append(
            Text(torch.tensor(row.ids), states, lse, row.prompt_len, row.prompt.index, greedy)
        )
        return n - row.prompt_len

    def _keep_invented(self, row: Row) -> None:
        """Queues a user's turn that the target wrote, unless it is cut, empty or odd."""
        turn = row.ids[row.prompt_len : -1]
        if row.ids[-1] != self.end_id or len(turn) not in INVENTED_LENS:
            return
        written = self.tokenizer.decode(turn, skip_special_tokens=False)
        text = (row.prompt.text + written).strip()
        if "<|" not in text and "\ufffd" not in text:
            self.invented.append(Prompt(row.prompt.index, "invented", text))

    def _resort(self) -> None:
        order = self.lengths.argsort()
        self.target.permute_slots(order)
        self.lengths = self.lengths[order]
        self.slots = [self.slots[i] for i in order.tolist()]

    def _sample(self, hidden: torch.Tensor, rows: list[Row]) -> tuple[list[int], list[float]]:
        """Next token and log-sum-exp per row. hidden: [n, d] after the final norm."""
        exact, ids, lse = self.target.candidates(hidden, CANDIDATES)
        picks = exact.argmax(-1)
        for i, row in enumerate(rows):
            if row.temperature > 0:
                picks[i] = draw(exact[i], row.temperature, row.top_p)
        return ids.gather(1, picks[:, None]).squeeze(1).tolist(), lse.tolist()


def draw(logits: torch.Tensor, temperature: float, top_p: float) -> int:
    """Samples an index of logits [k] after temperature and nucleus truncation."""
    probs = (logits / temperature).softmax(-1)
    ranked, order = probs.sort(descending=True)
    ranked[ranked.cumsum(0) - ranked >= top_p] = 0
    return int(order[int(torch.multinomial(ranked, 1))])


def loops(ids: list[int]) -> bool:
    """True when the tail repeats one stretch of up to MAX_PERIOD tokens three times or more."""
    for period in range(1, MAX_PERIOD + 1):
        span = max(2 * period, 24)
        if len(ids) >= span + period and ids[-span:] == ids[-span - period : -period]:
            return True
    return False


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m drafter_svc.training.generate`."""
    settings = parse_settings(__doc__, argv)
    torch.set_num_threads(settings.threads)
    settings.data.mkdir(parents=True, exist_ok=True)
    generator = Generator(settings)
    torch.manual_seed(generator.next_prompt)
    with torch.inference_mode():
        generator.run()


if __name__ == "__main__":
    main()
