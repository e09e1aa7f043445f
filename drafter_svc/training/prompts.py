"""Writes the prompts that the target answers for the drafter's training text.

Prompt `index` is a function of the index alone, so that generation resumes where it stopped. Chat,
code and arithmetic come from templates and word lists; a fourth kind asks the target itself to
invent the user's turn (as Magpie does), which covers what no template would. The held-out
evaluation prompts (heldout_prompts.json) are hand-written and share no wording with the templates.
"""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SHARES = {"code": 0.05, "maths": 0.05, "chat": 0.1, "invented": 0.8}
TEMPLATE_SHARES = {kind: SHARES[kind] for kind in ("code", "maths", "chat")}
MAX_WORD_ID = 20_000  # later tokens are rarer words and pieces of words
WORDS_FILE = Path(__file__).with_name("prompt_words.json")
OPENERS_FILE = Path(__file__).with_name("prompt_openers.json")

CHAT = [
    "Explain {topics} to a ten-year-old.",
    "What is the history of {topics}?",
    "Explain {topics} in simple terms.",
    "What are the main ideas behind {topics}?",
    "Give me three facts about {topics}.",
    "Write a short introduction to {topics}.",
    "Why is {topics} important?",
    "What are the advantages and disadvantages of {topics}?",
    "How does {topics} relate to {topics}?",
    "Compare {topics} and {topics}.",
    "Write a quiz with five questions about {topics}.",
    "Write a poem about {topics}.",
    "Tell me something surprising about {topics}.",
    "I know nothing about {topics}. Where should I start?",
    "Summarize what a beginner should know about {topics} in one paragraph.",
    "Write a blog post outline about {topics}.",
    "What are common misconceptions about {topics}?",
    "How can I {goals}?",
    "Give me five tips to {goals}.",
    "I want to {goals}, but I never find the time. What should I do?",
    "Make a weekly plan to help me {goals}.",
    "What is the best way to {goals}?",
    "List ten {categories}.",
    "Can you give me some {categories}?",
    "Name five {categories} and say one sentence about each.",
    "Write a short story about {people} in {places}.",
    "Write a dialogue between {people} and {people}.",
    "Continue this story: Once upon a time, {people} arrived in {places}.",
    "Describe {places} in the early morning.",
    "Write an email {mails}.",
    "Draft a polite message {mails}.",
    "What does a {jobs} do all day?",
    "Write a job advertisement for a {jobs}.",
    "Which skills does a good {jobs} need?",
    "What should I look for when buying {things}?",
    "Write a product description for {things}.",
    "Write a positive review of {things}.",
    "What is the capital of {countries} and what is it known for?",
    "Plan a three-day trip to {countries}.",
    "What food should I try in {countries}?",
    "Tell me about the culture of {countries}.",
    "Who was {figures}?",
    "What is {figures} best known for?",
    "If {figures} lived today, what would they do?",
    "Rewrite this sentence in a more formal tone: {sentences}",
    "Correct the grammar: {sentences}",
    "Make this shorter: {sentences}",
    "Translate into French: {sentences}",
    "Summarize the following text in two sentences:\n\n{passages}",
    "What is the main point of this passage?\n\n{passages}",
    "Write three questions about the text below.\n\n{passages}",
    "You are {people}. Introduce yourself and tell me about your day in {places}.",
    "Pretend you are {figures} and explain {topics}.",
    "Is it true that {topics} will change the way we live?",
    "hi! can you help me understand {topics}?",
]
CODE = [
    "Write a {languages} function that {tasks}.",
    "Write a Python function that {tasks}.",
    "Write a Python program that {tasks} and explain how it works.",
    "How do I write code that {tasks} in {languages}?",
    "Show me an example in {languages} that {tasks}.",
    "I need a short {languages} snippet that {tasks}. Add comments.",
    "Write a Python function that {tasks}. Include a docstring and an example call.",
    "Write unit tests for a Python function that {tasks}.",
    "Write a Python class or function that {tasks}, then improve its speed.",
    "Write an SQL query that {sql}.",
    "Write a bash command that {shell}.",
    "Write a shell script that {shell}.",
    "Write HTML and CSS for {web}.",
    "Explain {concepts} with an example.",
    "What is {concepts}?",
    "When should I use {concepts}?",
    "Implement this in {languages}: a program that {tasks}.",
    "def solve(data):\n    # {tasks}\n\nComplete this Python function.",
]
MATHS = [
    "What is {a} + {b}?",
    "What is {a} - {c}?",
    "Calculate {c} * {d}.",
    "What is {a} divided by {d}?",
    "What is {p}% of {h}?",
    "{name} has {a} {items} and buys {c} more. How many {items} does {name} have now?",
    "{name} has {a} {items}. {name2} has {c} more than {name}. How many do they have together?",
    "{name} buys {c} {items} at ${d} each and pays with a ${h} note. How much change is left?",
    "A box holds {d} {items}. How many {items} are in {c} boxes?",
    "{name} shares {h} {items} equally among {d} friends. How many does each friend get?",
    "A train travels {h} km in {d} hours. What is its average speed?",
    "A car drives at {speed} km/h for {d} hours. How far does it go?",
    "A shirt costs ${h} and is reduced by {p}%. What is the new price?",
    "Solve for x: {d}x + {c} = {h}.",
    "Solve the equation {d}x - {c} = {a} step by step.",
    "What is the area of a rectangle with length {c} cm and width {d} cm?",
    "Find the perimeter of a rectangle that is {a} m long and {c} m wide.",
    "What is the average of {a}, {b} and {c}?",
    "{name} earns ${c} per hour and works {d} hours a day. How much does {name} earn in 5 days?",
    "{name} reads {c} pages a day. How many days does it take to read a book of {h} pages?",
    "A recipe needs {d} cups of flour for {c} cookies. How much flour for {a} cookies?",
    "If {d} {items} cost ${c}, how much do {a} {items} cost?",
    "What is {d} squared plus {c}?",
    "Is {a} a prime number? Explain step by step.",
    "What is the next number in the sequence {d}, {d2}, {d3}, {d4}?",
    "{name} is {c} years old. {name2} is {d} years younger. How old will {name2} be in {d} years?",
    "What is the greatest common divisor of {a} and {b}?",
    "Convert {c} hours to minutes.",
    "A bag has {c} red and {d} blue marbles. What is the probability of drawing a red one?",
    "Simplify the fraction {c}/{a}.",
    "There are {a} students in a school. {p}% of them play a sport. How many students do not?",
    "{name} had {a} {items}, gave {d} to {name2} and lost {d2}. How many are left?",
]
MATHS_ENDINGS = ["", "", " Think step by step.", " Show your work.", " Explain your answer."]
CHAT_ENDINGS = [
    "",
    "",
    "",
    "",
    " Keep it short.",
    " Use bullet points.",
    " Answer in one paragraph.",
]


# How a user's turn begins that the target then goes on writing: not at all, with an opener of
# OPENERS_FILE, or with the first words of a template ("cut").
OPENER_SHARES = {"free": 0.1, "chat": 0.4, "code": 0.14, "maths": 0.12, "cut": 0.24}


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is the user's turn; when `invent`, only how it begins."""

    index: int
    kind: str
    text: str
    invent: bool = False


def make_prompt(index: int, words: dict[str, list[str]]) -> Prompt:
    """Prompt number `index` (>= 0); the same words give the same prompt in every process."""
    rng = random.Random(f"dspark-prompt-{index}")
    kind = _draw(rng, SHARES)
    if kind == "invented":
        return Prompt(index, kind, _opener(words, rng), invent=True)
    return Prompt(index, kind, _from_template(kind, words, rng))


def _from_template(kind: str, words: dict[str, list[str]], rng: random.Random) -> str:
    if kind == "maths":
        return rng.choice(MATHS).format(**_numbers(rng, words)) + rng.choice(MATHS_ENDINGS)
    text = _fill(rng.choice(CODE if kind == "code" else CHAT), words, rng)
    return text + rng.choice(CHAT_ENDINGS) if kind == "chat" and "\n" not in text else text


def _opener(words: dict[str, list[str]], rng: random.Random) -> str:
    kind = _draw(rng, OPENER_SHARES)
    if kind != "cut":
        return _fill(rng.choice(_openers()[kind]), words, rng)
    text = _from_template(_draw(rng, TEMPLATE_SHARES), words, rng).split(" ")
    return " ".join(text[: rng.randrange(1, len(text))])


@cache
def _openers() -> dict[str, list[str]]:
    openers: dict[str, list[str]] = json.loads(OPENERS_FILE.read_text(encoding="utf-8"))
    return openers


def load_words(tokens: list[str]) -> dict[str, list[str]]:
    """The word lists that fill the templates' slots; {word} is drawn from the target's own tokens.

    tokens: the vocabulary's strings by id, byte-level ("Ġ" marks a leading space).
    """
    words: dict[str, list[str]] = json.loads(WORDS_FILE.read_text(encoding="utf-8"))
    words["name"] = words["names"]
    words["num"] = [str(n) for n in range(2, 100)]
    words["word"] = [
        token[1:]
        for token in tokens[:MAX_WORD_ID]
        if len(token) > 4 and token[0] == "Ġ" and token[1:].isascii() and token[1:].islower()
    ]
    return words


def _draw(rng: random.Random, shares: dict[str, float]) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def _fill(template: str, words: dict[str, list[str]], rng: random.Random) -> str:
    """Replaces every {slot} with its own draw, so a slot named twice gets two words."""
    head, *rest = template.split("{")
    for piece in rest:
        slot, tail = piece.split("}", 1)
        head += rng.choice(words[slot]) + tail
    return head


def _numbers(rng: random.Random, words: dict[str, list[str]]) -> dict[str, object]:
    start, step = rng.randint(1, 12), rng.randint(2, 9)
    name, name2 = rng.sample(words["names"], 2)
    return {
        "a": rng.randint(20, rng.choice([99, 999])),
        "b": rng.randint(20, rng.choice([99, 999])),
        "c": rng.randint(5, 40),
        "d": start,
        "d2": start + step,
        "d3": start + 2 * step,
        "d4": start + 3 * step,
        "h": rng.randint(5, 60) * 10,
        "p": rng.choice([5, 10, 15, 20, 25, 30, 40, 50, 75]),
        "speed": rng.randint(4, 13) * 10,
        "name": name,
        "name2": name2,
        "items": rng.choice(words["items"]),
    }


OPENING = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


def chat_prefix(user_text: str) -> str:
    """The target's chat template around the user's turn, up to where the target answers."""
    return f"{OPENING}{user_text}<|im_end|>\n<|im_start|>assistant\n"
